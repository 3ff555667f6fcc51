/** The sidebar: the runs of the workspace, refreshed every few seconds while visible. */
import type { CommandRegistry } from '@lumino/commands';
import { Widget } from '@lumino/widgets';
import type { Channel } from './channel';
import { COMMANDS } from './commands';
import type { Desk } from './desk';
import { icon } from './icon';
import { RunList } from './run_list';
import type { Strings } from './strings';
import type { RunRow, RunsFolder } from './wire';

const LIVE_MS = 1_000;
const QUIET_MS = 4_000;

/** Where to look for runs: folders of the file browser, and the name of the runs folder in them. */
export interface Places {
  folders: string[];
  name: string;
}

export class RunsPanel extends Widget {
  private list: RunList;
  private buttons = new Map<string, HTMLButtonElement>();
  private search = document.createElement('input');
  private line = document.createElement('p');
  private note = document.createElement('p');
  private channel?: Channel;
  private timer?: ReturnType<typeof setTimeout>;
  private asking = false;
  /** What is asked for is no longer what to show. */
  private stale = false;
  private shown = '';
  private listed: RunsFolder[] = [];
  /** Folders of runs that were opened by the file browser. */
  private asked = new Set<string>();
  private sizes = new Map<string, { bytes: number; time: number }>();

  constructor(
    private desk: Desk,
    private commands: CommandRegistry,
    private places: () => Places,
    private t: Strings,
  ) {
    super();
    this.id = 'jp-llmdebug-panel';
    this.addClass('jp-llmdebug-panel');
    this.title.icon = icon;
    this.title.caption = t.panel;
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', t.panel);
    this.list = new RunList(t, {
      selected: () => this.follow(),
      open: () =>
        void commands.execute(this.selection.length === 2 ? COMMANDS.compare : COMMANDS.open),
      delete: () => void commands.execute(COMMANDS.delete),
    });
    this.line.setAttribute('role', 'status');
    this.line.className = 'jp-llmdebug-line';
    this.note.className = 'jp-llmdebug-note';
    this.note.textContent = t.loading;
    this.list.root.hidden = true;
    this.search.type = 'search';
    this.search.placeholder = t.search;
    this.search.setAttribute('aria-label', t.search);
    this.search.className = 'jp-llmdebug-search';
    this.search.oninput = () => this.display(this.listed);
    this.node.append(this.toolbar(), this.search, this.line, this.note, this.list.root);
  }

  get selection(): RunRow[] {
    return this.list.selection;
  }

  swap(): void {
    this.list.swap();
  }

  /** If a folder holds runs, list them, select the newest one, and return true. */
  async listFolder(folder: string): Promise<boolean> {
    const { folders } = await (await this.connected()).ask('runs', { folders: [folder], name: '' });
    const newest = folders.find(one => one.kind === 'run')?.runs[0];
    if (!newest) return false;
    this.asked.add(folder);
    this.stale = true;
    this.search.value = '';
    const known = this.listed.some(one => one.runs.some(run => run.path === newest.path));
    this.display(known ? this.listed : [...this.listed, ...folders]);
    this.list.select(newest.path);
    return true;
  }

  async delete(runs: RunRow[]): Promise<void> {
    try {
      const channel = await this.connected();
      for (const run of runs) await channel.ask('delete', { path: run.path });
    } catch (error) {
      this.say(this.t.failed((error as Error).message));
    }
    await this.refresh();
  }

  /** Refresh the list now, then regularly while the panel is visible. */
  async refresh(): Promise<void> {
    clearTimeout(this.timer);
    this.stale = true;
    if (!this.isVisible || this.asking) return;
    this.asking = true;
    let wait = QUIET_MS;
    try {
      if (this.display(await this.load())) wait = LIVE_MS;
    } catch (error) {
      this.fail((error as Error).message);
      return;
    } finally {
      this.asking = false;
    }
    this.timer = setTimeout(() => void this.refresh(), wait);
  }

  /** Ask for the runs, and again if places or runs changed meanwhile. */
  private async load(): Promise<RunsFolder[]> {
    for (;;) {
      this.stale = false;
      const { folders: here, name } = this.places();
      const places = { folders: [...new Set([...here, ...this.asked])], name };
      try {
        const { folders } = await (await this.connected()).ask('runs', places);
        if (!this.stale) return folders;
      } catch (error) {
        if (!this.stale) throw error;
      }
    }
  }

  protected onAfterShow(): void {
    void this.refresh();
  }

  protected onAfterAttach(): void {
    void this.refresh();
  }

  protected onBeforeHide(): void {
    clearTimeout(this.timer);
  }

  protected onBeforeDetach(): void {
    clearTimeout(this.timer);
  }

  protected onActivateRequest(): void {
    (this.list.root.hidden ? this.node.querySelector('button') : this.list.root)?.focus();
  }

  /** Show the runs. Return true if one is being recorded. */
  private display(folders: RunsFolder[]): boolean {
    const runs = folders.flatMap(folder => folder.runs);
    const recording = runs.filter(run => run.state === 'recording');
    const rates = this.rates(recording);
    const words = this.search.value.trim();
    const now = JSON.stringify([folders, [...rates], words]);
    this.listed = folders;
    if (now !== this.shown) {
      this.shown = now;
      this.list.show(folders, rates, words);
      const some = this.list.root.childElementCount > 0;
      this.list.root.hidden = !some;
      this.note.hidden = some;
      this.note.textContent = runs.length ? this.t.nothingFound(words) : this.t.noRuns;
      this.note.setAttribute('role', 'note');
    }
    return recording.length > 0;
  }

  /** Return the bytes per second since the last refresh, by path. */
  private rates(recording: RunRow[]): Map<string, number> {
    const rates = new Map<string, number>();
    const time = performance.now();
    const sizes = new Map(recording.map(run => [run.path, { bytes: run.bytes, time }]));
    for (const run of recording) {
      const before = this.sizes.get(run.path);
      if (before)
        rates.set(
          run.path,
          Math.max(0, (1000 * (run.bytes - before.bytes)) / (time - before.time)),
        );
    }
    this.sizes = sizes;
    return rates;
  }

  private async connected(): Promise<Channel> {
    if (!this.channel?.isOpen) this.channel = await this.desk.channel('llmdebug_nb.runs');
    return this.channel;
  }

  private toolbar(): HTMLElement {
    const bar = document.createElement('div');
    bar.className = 'jp-llmdebug-actions';
    bar.setAttribute('role', 'group');
    bar.setAttribute('aria-label', this.t.actions);
    for (const name of ['open', 'compare', 'swap', 'reveal', 'delete'] as const) {
      const command = COMMANDS[name];
      const button = document.createElement('button');
      button.textContent = this.t[name];
      button.disabled = true;
      button.title = this.t[`${name}Caption`];
      button.onclick = () => void this.commands.execute(command);
      this.buttons.set(command, button);
      bar.append(button);
    }
    return bar;
  }

  private follow(): void {
    for (const [command, button] of this.buttons)
      button.disabled = !this.commands.isEnabled(command);
    const [golden, mine] = this.selection;
    const n = this.selection.length;
    const compared = golden && mine && this.commands.isEnabled(COMMANDS.compare);
    this.say(compared ? this.t.willCompare(golden.name, mine.name) : n ? this.t.selected(n) : '');
    Object.values(COMMANDS).forEach(command => this.commands.notifyCommandChanged(command));
  }

  private say(text: string): void {
    this.line.textContent = text;
  }

  private fail(why: string): void {
    this.shown = '';
    this.list.root.hidden = true;
    this.note.hidden = false;
    this.note.setAttribute('role', 'alert');
    this.note.textContent = this.t.failed(why);
    const again = document.createElement('button');
    again.textContent = this.t.retry;
    again.onclick = () => {
      this.note.textContent = this.t.loading;
      void this.refresh();
    };
    this.note.append(again);
  }
}
