/**
 * The explorer. Of a run: token stepper, model tree, records and tensor. Of a comparison: the
 * answer, where the error goes, code beside code and the tensor; tree and records in a drawer.
 *
 * `position`, `selected` and `path` are traits of the Python widget. The page and the kernel may
 * change them; the views are updated by the traits' change events only.
 */
import type { AnyModel } from '@anywidget/types';
import { Answer } from './answer';
import { Code, codeAt, codeOf } from './code';
import { clamp, h } from './dom';
import { Foot } from './foot';
import { Halt } from './halt';
import { header } from './header';
import { Help } from './help';
import { onKeys } from './keys';
import { Panel } from './panel';
import { Rows } from './rows';
import { Rpc, type Wait } from './rpc';
import { Status } from './status';
import { Stepper } from './stepper';
import * as T from './strings';
import { mounted } from './mounted';
import { Timeline } from './timeline';
import { Tree } from './tree';
import { Walk } from './walk';
import type { ExportRequest, Overview, State, TreeNode } from './wire';

export interface Traits {
  snapshot: Overview;
  position: number;
  selected: number;
  path: string;
  /** In a saved page: the state of the explorer when it was saved. */
  saved?: State;
}

/** Shows an explorer in `root`, anew at each halt of a program. Returns what removes it. */
export function explore(model: AnyModel<Traits>, root: HTMLElement): () => void {
  const renew = (focus: string) => {
    explorer.dispose();
    const next = h('div', { class: 'llmdebug' });
    root.replaceWith(next);
    root = next;
    explorer = new Explorer(model, root, renew, focus);
  };
  let explorer = new Explorer(model, root, renew);
  return () => explorer.dispose();
}

/** What only a comparison has. */
interface Comparison {
  answer: Answer;
  timeline: Timeline;
  code: Code;
}

/** JupyterLab's extension listens, and prevents the default. */
export const POP_OUT = 'llmdebug:pop-out';

/** More points than a tensor has steps. */
const ALL_STEPS = 100_000;

export class Explorer {
  private status = new Status();
  private controls = h('fieldset', { class: 'llmdebug-controls', role: 'presentation' });
  private rpc: Rpc;
  private comparison: Comparison | null = null;
  private halt: Halt | null = null;
  private stepper: Stepper | null = null;
  private tree: Tree;
  private rows: Rows;
  private walk: Walk;
  private panel: Panel;
  private foot: Foot;
  private help: Help;
  private overview: Overview;
  private offKeys: () => void;
  /** The tree has been unfolded once, to the first selected record. */
  private opened = false;
  /** Numbers of changes of position and module. A slow reply must not undo a later change. */
  private moves = 0;
  private narrowings = 0;

  constructor(
    private model: AnyModel<Traits>,
    private root: HTMLElement,
    private renew: (focus: string) => void,
    focus = '',
  ) {
    const overview = (this.overview = model.get('snapshot'));
    const report = overview.kind === 'report';
    this.rpc = new Rpc(
      model,
      wait => this.wait(wait),
      text => this.status.fail(text),
    );
    const { ask } = this.rpc;
    const saved = model.get('saved');
    this.tree = new Tree(ask, node => this.under(node));
    const stepLabel = (index: number) => this.overview.steps[index]?.label ?? String(index);
    this.rows = new Rows(ask, report, overview.ranks, stepLabel, {
      choose: row => this.set('selected', row.id),
      clearNode: () => this.under(null),
      narrowed: () => void this.follow(false),
    });
    this.walk = new Walk(ask, this.rows, report, {
      here: () => ({ selected: model.get('selected'), position: this.position }),
      go: row => this.set('selected', row),
      say: text => this.status.say(text),
    });
    this.panel = new Panel(ask, report, stepLabel, {
      overview: () => this.overview,
      updated: (...news) => this.take(...news),
      jump: row => this.set('selected', row),
      tree: path => void this.go(path),
      say: text => this.status.say(text),
      shown: row => this.comparison?.timeline.follow(row),
    });
    if (saved) {
      root.classList.add('llmdebug-saved');
      this.panel.begin(saved);
      this.rows.begin(saved);
    }
    const halted = overview.halt > 0;
    this.help = new Help(report);
    this.foot = new Foot(report, report || halted, this.status, {
      walk: (delta, mismatch) => void this.walk.on(delta, mismatch),
      save: saved ? undefined : kind => void this.save(kind),
      help: () => this.help.turn(),
      opened: () => this.reveal(),
      popOut: () => this.popOut(),
    });
    if (halted) this.layHalt(focus);
    else if (report) this.layComparison(overview);
    else this.layRun(overview);
    root.append(this.controls);
    root.setAttribute('role', 'region');
    root.setAttribute('aria-label', `${T.explorer}: ${overview.title}`);
    for (const action of ['pointerdown', 'keydown'])
      root.addEventListener(
        action,
        event => {
          this.status.say('');
          this.stepper?.halt(event);
        },
        true,
      );
    this.offKeys = onKeys(root, this.keys());
    model.on('change:position', this.onPosition);
    model.on('change:selected', this.onSelected);
    model.on('change:path', this.onPath);
    model.on('change:snapshot', this.onSnapshot);
    this.onPosition();
    void this.tree.start(); // after the records: for a large model the kernel needs longer
    this.onSelected();
    if (model.get('path')) this.onPath();
  }

  dispose(): void {
    this.offKeys();
    this.model.off('change:position', this.onPosition);
    this.model.off('change:selected', this.onSelected);
    this.model.off('change:path', this.onPath);
    this.model.off('change:snapshot', this.onSnapshot);
    const { comparison, rpc, stepper, tree, rows, panel } = this;
    for (const part of [rpc, stepper, tree, rows, panel, comparison?.timeline]) part?.dispose();
  }

  private layRun(overview: Overview): void {
    this.stepper = new Stepper(
      overview.steps,
      position => void this.step(position),
      () => this.rpc.idle,
    );
    this.controls.append(
      header(overview),
      this.stepper.root,
      h('div', { class: 'llmdebug-main' }, this.tree.root, this.rows.root, this.panel.root),
      this.foot.root,
      this.help.root,
    );
  }

  private layHalt(focus: string): void {
    const say = (text: string) => this.status.say(text);
    const code = new Code(say);
    this.root.classList.add('llmdebug-report');
    this.halt = new Halt(
      this.rpc.ask,
      { show: halt => code.show(codeAt(halt)), updated: (...news) => this.take(...news), say },
      focus,
    );
    this.controls.append(
      this.halt.root,
      h('div', { class: 'llmdebug-split' }, code.root, this.panel.root),
      this.foot.root,
      this.foot.hold(h('div', { class: 'llmdebug-main' }, this.tree.root, this.rows.root)),
      this.help.root,
    );
  }

  private layComparison(overview: Overview): void {
    const { ask } = this.rpc;
    const say = (text: string) => this.status.say(text);
    const code = new Code(say);
    const timeline = new Timeline(ask, overview, {
      choose: (row, step) => this.jump(row, step),
      position: position => void this.step(position),
    });
    this.root.classList.add('llmdebug-report');
    const split = h('div', { class: 'llmdebug-split' }, code.root, this.panel.root);
    const answer = new Answer(overview, ask, {
      show: (at, detail) => code.show(codeOf(this.overview.findings[at], detail)),
      chosen: ({ row }) => row >= 0 && this.set('selected', row),
      updated: (...news) => this.take(...news),
      say,
    });
    this.comparison = { answer, timeline, code };
    this.controls.append(
      answer.root,
      timeline.root,
      split,
      this.foot.root,
      this.foot.hold(h('div', { class: 'llmdebug-main' }, this.tree.root, this.rows.root)),
      this.help.root,
    );
  }

  private keys(): Record<string, () => void> {
    const { comparison } = this;
    return {
      n: () => void this.walk.on(1, false),
      p: () => void this.walk.on(-1, false),
      N: () => void this.walk.on(1, true),
      P: () => void this.walk.on(-1, true),
      e: () => this.panel.expect(),
      '[': () => void this.step(this.position - 1),
      ']': () => void this.step(this.position + 1),
      '?': () => this.help.turn(),
      ...(comparison
        ? {
            f: () => comparison.answer.next(),
            c: () => comparison.code.focus(),
            t: () => this.panel.focus(),
          }
        : {}),
    };
  }

  /** Ask JupyterLab for a tab with a view of this explorer; elsewhere fill the screen. */
  private popOut(): void {
    const { model, overview } = this;
    const mount = (root: HTMLElement) => explore(model, root);
    const event = new CustomEvent(POP_OUT, {
      bubbles: true,
      composed: true,
      cancelable: true,
      detail: { title: overview.title, mount: (el: HTMLElement) => mounted(el, mount) },
    });
    if (this.root.dispatchEvent(event))
      void this.root.requestFullscreen?.().catch(() => this.status.say(T.noPopOut));
  }

  /** Set the overview that the kernel sent as a reply. It may also set the trait itself. */
  private take(overview: Overview, text: string): void {
    this.status.say(text);
    this.model.set('snapshot', overview);
  }

  /** Show new verdicts: position, selection and focus stay. Or show another comparison. */
  private onSnapshot = (): void => {
    const { inside, halt } = this.overview;
    this.overview = this.model.get('snapshot');
    const other = inside !== this.overview.inside;
    if (halt !== this.overview.halt) return this.renew(this.halt?.focused ?? '');
    const focused = this.focusedMark();
    this.comparison?.answer.take(this.overview);
    this.comparison?.timeline.take(this.overview);
    this.stepper?.take(this.overview.steps);
    if (other) return this.restart();
    void this.tree.reload();
    this.rows.refresh();
    void this.follow(false);
    void this.panel.show(this.model.get('selected')).then(() => {
      if (focused) this.controls.querySelector<HTMLElement>(`[data-mark='${focused}']`)?.focus();
    });
  };

  /** Begin anew: rows and modules are those of another comparison. */
  private restart(): void {
    this.rows.clearFilter();
    this.narrow(null);
    void this.tree.restart();
    const { findings, first_bad } = this.overview;
    const row = findings.find(finding => finding.row >= 0)?.row ?? first_bad;
    this.set('position', 0);
    this.set('selected', row);
    this.rows.refresh();
  }

  /** Return the key of the mark button that has the focus or whose form has it. */
  private focusedMark(): string | null | undefined {
    const { activeElement } = this.root.getRootNode() as Document | ShadowRoot;
    const part = activeElement?.closest('.llmdebug-expect, [data-mark]');
    const key = part?.matches('[data-mark]') ? part : part?.querySelector('[data-mark]');
    return key?.getAttribute('data-mark');
  }

  /** Without a kernel, the controls are disabled. */
  private wait(wait: Wait): void {
    this.status.wait(wait);
    this.controls.disabled = wait === 'dead' || wait === 'gone';
  }

  /** The kernel writes the file: it knows the notebook's folder, and a page may not save files. */
  private async save(kind: ExportRequest['kind']): Promise<void> {
    const { mismatch, text } = this.rows.filter;
    const reply = await this.rpc.ask('export', {
      kind,
      position: this.position,
      selected: this.model.get('selected'),
      path: this.model.get('path'),
      mismatch,
      text,
      ...this.panel.look,
    });
    if (reply) this.status.say(T.saved(reply.answer.path));
  }

  private get position(): number {
    return clamp(this.model.get('position'), 0, Math.max(0, this.overview.steps.length - 1));
  }

  private set<K extends 'position' | 'selected' | 'path'>(name: K, value: Traits[K]): void {
    if (this.model.get(name) === value) {
      if (name === 'selected') this.onSelected(); // the list may have scrolled away
      return;
    }
    this.model.set(name, value);
    this.model.save_changes();
  }

  private onPosition = (): void => {
    this.moves++;
    this.stepper?.show(this.position);
    this.comparison?.timeline.show(this.position);
    this.rows.show(this.position, this.tree.selected);
  };

  private onSelected = (): void => {
    void this.panel.show(this.model.get('selected'));
    void this.follow(true);
  };

  private onPath = (): void => {
    this.narrowings++; // a module that is being looked up is not wanted any more
    if (this.model.get('path') !== (this.tree.selected?.path ?? ''))
      void this.go(this.model.get('path'));
  };

  /** List only the records of the module at `path`. */
  private async go(path: string): Promise<void> {
    const asked = ++this.narrowings;
    const node = path ? await this.tree.find(path) : null;
    if (asked === this.narrowings) this.under(node);
  }

  /** Go to another token, and show the same tensor there if it was recorded. */
  private async step(position: number): Promise<void> {
    if (position !== clamp(position, 0, this.overview.steps.length - 1)) return;
    const row = this.model.get('selected');
    this.set('position', position);
    const { moves } = this;
    if (row < 0) return;
    const reply = await this.rpc.ask('series', { row, n: ALL_STEPS });
    const there = reply?.answer.lines
      .flatMap(line => line.points)
      .find(point => point.step === position);
    if (there && moves === this.moves && row === this.model.get('selected'))
      this.set('selected', there.row);
  }

  /** Select a row. If nothing was recorded there, go to its step. */
  private jump(row: number, step: number): void {
    if (row < 0) void this.step(step);
    else this.set('selected', row);
  }

  private under(node: TreeNode | null): void {
    this.narrow(node);
    void this.follow(false);
  }

  private narrow(node: TreeNode | null): void {
    this.narrowings++;
    this.tree.mark(node);
    this.rows.show(this.position, node);
    this.set('path', node?.path ?? '');
  }

  /** Scroll the list to the selected record. `must`: clear the filters if they hide it. */
  private async follow(must: boolean): Promise<void> {
    const row = this.model.get('selected');
    if (row < 0) {
      this.tree.pointAt(null);
      return this.rows.select(-1, -1);
    }
    // with all tokens listed, the position may have to follow
    if (this.rows.has(row) && !this.rows.filter.every) return;
    const { moves } = this;
    const filter = JSON.stringify(this.rows.filter);
    let at = await this.rows.where(row);
    if (row !== this.model.get('selected')) return;
    if (must && at && at.index < 0 && filter === JSON.stringify(this.rows.filter)) {
      this.rows.clearFilter();
      this.narrow(null);
      at = await this.rows.where(row);
    }
    if (!at?.row || row !== this.model.get('selected')) return;
    this.tree.pointAt(at.row.path);
    if (!this.opened) void this.tree.reveal(at.row.path);
    this.opened = true;
    if (must && moves === this.moves && at.row.step !== this.position)
      this.set('position', at.row.step);
    this.rows.select(row, this.rows.shows(at.row.step) ? at.index : -1);
  }

  /** Scroll to the selected record: a list that was hidden could not. */
  private reveal(): void {
    this.rows.select(-1, -1);
    void this.follow(true);
  }
}
