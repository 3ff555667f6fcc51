/** The list of runs and reports. It remembers the order in which several are selected. */
import type { Strings } from './strings';
import type { RunRow, RunsFolder } from './wire';

export interface RunListEvents {
  selected: () => void;
  open: () => void;
  delete: () => void;
}

export class RunList {
  readonly root = document.createElement('div');
  /** Paths in the order of their selection. */
  private chosen: string[] = [];
  private active = '';
  private all: RunRow[] = [];
  /** Those that are shown. */
  private rows: RunRow[] = [];
  private options = new Map<string, HTMLElement>();

  constructor(
    private t: Strings,
    private on: RunListEvents,
  ) {
    const { root } = this;
    root.className = 'jp-llmdebug-runs';
    root.tabIndex = 0;
    root.setAttribute('role', 'listbox');
    root.setAttribute('aria-multiselectable', 'true');
    root.setAttribute('aria-label', t.list);
    root.addEventListener('click', event => this.click(event));
    root.addEventListener('contextmenu', event => this.rightClick(event));
    root.addEventListener('dblclick', event => this.pathAt(event) && on.open());
    root.addEventListener('keydown', event => this.key(event));
    root.addEventListener('focus', () => this.active || this.move(0));
  }

  get selection(): RunRow[] {
    return this.chosen.flatMap(path => this.all.filter(row => row.path === path));
  }

  /** Show the rows that have `words` in their names or models. What is selected stays so. */
  show(folders: RunsFolder[], rates: Map<string, number>, words = ''): void {
    this.all = folders.flatMap(folder => folder.runs);
    const found = folders
      .map(folder => ({ ...folder, runs: folder.runs.filter(run => has(run, words)) }))
      .filter(folder => folder.runs.length);
    this.rows = found.flatMap(folder => folder.runs);
    const known = new Set(this.all.map(row => row.path));
    const before = this.chosen.length;
    this.chosen = this.chosen.filter(path => known.has(path));
    if (!this.rows.some(row => row.path === this.active)) this.active = '';
    this.options.clear();
    this.root.replaceChildren(
      ...found.map((folder, index) => this.group(folder, index, folders.length > 1, rates)),
    );
    this.mark();
    if (this.chosen.length !== before) this.on.selected();
  }

  /** Exchange the two selected runs: the first one is golden. */
  swap(): void {
    this.choose([...this.chosen].reverse());
  }

  select(path: string): void {
    this.active = path;
    this.choose([path]);
    this.options.get(path)?.scrollIntoView({ block: 'nearest' });
  }

  private group(
    folder: RunsFolder,
    index: number,
    titled: boolean,
    rates: Map<string, number>,
  ): HTMLElement {
    const group = element('div', '');
    if (titled) {
      const title = element(
        'div',
        'jp-llmdebug-folder',
        folder.kind === 'run' ? folder.folder : this.t.reports(folder.folder),
      );
      title.id = `jp-llmdebug-folder-${index}`;
      group.setAttribute('role', 'group');
      group.setAttribute('aria-labelledby', title.id);
      title.setAttribute('role', 'presentation');
      group.append(title);
    } else group.setAttribute('role', 'presentation');
    group.append(...folder.runs.map(run => this.option(run, rates.get(run.path))));
    return group;
  }

  private option(run: RunRow, rate: number | undefined): HTMLElement {
    const option = element('div', 'jp-llmdebug-run');
    option.id = `jp-llmdebug-run-${this.options.size}`;
    option.dataset.path = run.path;
    option.title = run.problem || run.path;
    option.setAttribute('role', 'option');
    const name = element('span', 'jp-llmdebug-name', run.name);
    option.append(name);
    if (run.state !== 'complete') {
      const isLive = run.state === 'recording' && rate !== undefined;
      const speed = isLive ? ` · ${this.t.rate(size(rate))}` : '';
      option.append(
        element('span', `jp-llmdebug-state jp-llmdebug-${run.state}`, this.t[run.state] + speed),
      );
    }
    if (run.verdict) {
      const verdict = this.t.verdict(run.against, run.verdict.replaceAll('_', ' '));
      option.append(element('span', 'jp-llmdebug-verdict', verdict));
    }
    const figures = [
      run.model,
      run.created ? new Date(1000 * run.created).toLocaleString() : '',
      run.steps === null ? '' : this.t.steps(run.steps),
      run.records === null ? '' : this.t.tensors(run.records),
      size(run.bytes),
    ];
    option.append(element('span', 'jp-llmdebug-figures', figures.filter(Boolean).join(' · ')));
    this.options.set(run.path, option);
    return option;
  }

  private click(event: MouseEvent): void {
    const path = this.pathAt(event);
    if (!path) return;
    this.active = path;
    if (event.shiftKey || event.ctrlKey || event.metaKey) this.toggle(path);
    else this.choose([path]);
  }

  private rightClick(event: MouseEvent): void {
    const path = this.pathAt(event);
    if (!path) return;
    this.active = path;
    if (!this.chosen.includes(path)) this.choose([path]);
  }

  private key(event: KeyboardEvent): void {
    const last = this.rows.length - 1;
    const moves: Record<string, number> = { ArrowUp: -1, ArrowDown: 1, Home: -last, End: last };
    const move = moves[event.key];
    if (move !== undefined) {
      this.move(move);
      if (event.shiftKey)
        this.choose([...this.chosen.filter(path => path !== this.active), this.active]);
      else if (!event.ctrlKey) this.choose([this.active]);
    } else if (event.key === ' ' && this.active) this.toggle(this.active);
    else if (event.key === 'Enter') this.on.open();
    else if (event.key === 'Delete') this.on.delete();
    else if (event.key === 'a' && (event.ctrlKey || event.metaKey))
      this.choose(this.rows.map(row => row.path));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  private move(by: number): void {
    const at = this.rows.findIndex(row => row.path === this.active);
    const next = at < 0 ? 0 : Math.min(Math.max(at + by, 0), this.rows.length - 1);
    this.active = this.rows[next]?.path ?? '';
    this.mark();
    this.options.get(this.active)?.scrollIntoView({ block: 'nearest' });
  }

  private toggle(path: string): void {
    this.choose(
      this.chosen.includes(path) ? this.chosen.filter(one => one !== path) : [...this.chosen, path],
    );
  }

  private choose(paths: string[]): void {
    this.chosen = paths.filter(Boolean);
    this.mark();
    this.on.selected();
  }

  private mark(): void {
    for (const [path, option] of this.options) {
      option.setAttribute('aria-selected', String(this.chosen.includes(path)));
      option.classList.toggle('jp-llmdebug-active', path === this.active);
    }
    const active = this.options.get(this.active);
    if (active) this.root.setAttribute('aria-activedescendant', active.id);
    else this.root.removeAttribute('aria-activedescendant');
  }

  private pathAt(event: Event): string | undefined {
    return (event.target as Element).closest<HTMLElement>('.jp-llmdebug-run')?.dataset.path;
  }
}

/** Tell whether a row has each of these words in its name or model. */
function has(run: RunRow, words: string): boolean {
  const text = `${run.name} ${run.model}`.toLowerCase();
  return words
    .toLowerCase()
    .split(/\s+/)
    .every(word => text.includes(word));
}

function element(tag: string, className: string, text = ''): HTMLElement {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

/** Format a size as Python's output does: 1 MB is 10**6 bytes. */
export function size(bytes: number): string {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  const power = Math.min(Math.floor(Math.log10(Math.max(bytes, 1)) / 3), units.length - 1);
  return `${(bytes / 1000 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}
