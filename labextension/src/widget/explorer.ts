/**
 * The explorer: token stepper, model tree, list of records and tensor panel, kept in sync.
 *
 * `position`, `selected` and `path` are traits of the Python widget. The page and the kernel may
 * change them; the views are updated by the traits' change events only.
 */
import type { AnyModel } from '@anywidget/types';
import { button, clamp, h } from './dom';
import { header } from './header';
import { onKeys } from './keys';
import { Layers } from './layers';
import { Panel } from './panel';
import { Rows, WHOLE } from './rows';
import { Rpc, type Wait } from './rpc';
import { Status } from './status';
import { Stepper } from './stepper';
import * as T from './strings';
import { Tree } from './tree';
import type { ExportRequest, Layer, Located, Overview, State, TreeNode } from './wire';

export interface Traits {
  snapshot: Overview;
  position: number;
  selected: number;
  path: string;
  /** In a saved page: the state of the explorer when it was saved. */
  saved?: State;
}

export class Explorer {
  private status = new Status();
  private controls = h('fieldset', { class: 'llmdebug-controls', role: 'presentation' });
  private rpc: Rpc;
  private stepper: Stepper;
  private tree: Tree;
  private rows: Rows;
  private panel: Panel;
  private layers: Layers | null;
  private overview: Overview;
  private head: HTMLElement;
  private offKeys: () => void;
  /** The tree has been unfolded once, to the first selected record. */
  private opened = false;
  /** Number of position changes. A slow reply must not undo a later change. */
  private moves = 0;

  constructor(
    private model: AnyModel<Traits>,
    root: HTMLElement,
  ) {
    const overview = (this.overview = model.get('snapshot'));
    const report = overview.kind === 'report';
    this.rpc = new Rpc(
      model,
      wait => this.wait(wait),
      text => this.status.fail(text),
    );
    const { ask } = this.rpc;
    this.stepper = new Stepper(
      overview.steps,
      position => this.set('position', position),
      () => this.rpc.idle,
    );
    this.tree = new Tree(ask, node => this.under(node));
    const stepLabel = (index: number) => overview.steps[index]?.label ?? String(index);
    this.rows = new Rows(ask, report, stepLabel, {
      choose: row => this.set('selected', row.id),
      clearNode: () => this.under(null),
      narrowed: () => void this.follow(false),
    });
    this.panel = new Panel(ask, stepLabel, {
      overview: () => this.overview,
      updated: overview => this.take(overview),
      jump: row => this.set('selected', row),
      tree: path => void this.go(path),
      say: text => this.status.say(text),
    });
    const saved = model.get('saved');
    if (saved) {
      root.classList.add('llmdebug-saved');
      this.panel.begin(saved);
      this.rows.begin(saved);
    }
    root.setAttribute('role', 'region');
    root.setAttribute('aria-label', `${T.explorer}: ${overview.title}`);
    this.layers = report
      ? new Layers(ask, overview.steps, (layer, step, row) => void this.jump(layer, step, row))
      : null;
    this.head = this.header();
    this.controls.append(
      this.head,
      ...(this.layers ? [this.layers.root] : []),
      this.stepper.root,
      h('div', { class: 'llmdebug-main' }, this.tree.root, this.rows.root, this.panel.root),
      this.bar(report, !saved),
    );
    root.append(this.controls);
    for (const action of ['pointerdown', 'keydown'])
      root.addEventListener(
        action,
        event => {
          this.status.say('');
          this.stepper.halt(event);
        },
        true,
      );
    this.offKeys = onKeys(root, {
      record: delta => void this.walk(delta, false),
      mismatch: delta => void this.walk(delta, true),
      expect: () => this.panel.expect(),
    });
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
    for (const part of [this.rpc, this.stepper, this.tree, this.rows, this.panel, this.layers])
      part?.dispose();
  }

  private header(): HTMLElement {
    return header(this.overview, this.rpc.ask, {
      jump: row => this.set('selected', row),
      say: text => this.status.say(text),
      updated: overview => this.take(overview),
    });
  }

  /** Set the overview that the kernel sent as a reply. It may also set the trait itself. */
  private take(overview: Overview): void {
    const removed = overview.marks.length < this.overview.marks.length;
    this.status.say(removed ? T.unmarkedNow : T.markedNow);
    this.model.set('snapshot', overview);
  }

  /** Show new verdicts. Position, selection, open details and focus stay. */
  private onSnapshot = (): void => {
    this.overview = this.model.get('snapshot');
    const focused = this.focusedMark();
    const open = new Map(
      [...this.head.querySelectorAll('details')].map(one => [one.dataset.open, one.open]),
    );
    const fresh = this.header();
    for (const details of fresh.querySelectorAll('details'))
      details.open = open.get(details.dataset.open) ?? details.open;
    this.head.replaceWith(fresh);
    this.head = fresh;
    this.stepper.take(this.overview.steps);
    void this.layers?.reload();
    void this.tree.reload();
    this.rows.refresh();
    void this.follow(false);
    void this.panel.show(this.model.get('selected')).then(() => {
      if (focused) this.controls.querySelector<HTMLElement>(`[data-mark='${focused}']`)?.focus();
    });
  };

  /** Return the key of the mark button that has the focus or whose form has it. */
  private focusedMark(): string | null | undefined {
    const { activeElement } = this.head.getRootNode() as Document | ShadowRoot;
    const part = activeElement?.closest('.llmdebug-expect, [data-mark]');
    const key = part?.matches('[data-mark]') ? part : part?.querySelector('[data-mark]');
    return key?.getAttribute('data-mark');
  }

  /** Without a kernel, the controls are disabled. */
  private wait(wait: Wait): void {
    this.status.wait(wait);
    this.controls.disabled = wait === 'dead' || wait === 'gone';
  }

  private bar(report: boolean, savable: boolean): HTMLElement {
    const walker = (label: string, face: string, delta: 1 | -1, mismatch: boolean) =>
      button(
        () => void this.walk(delta, mismatch),
        { title: label },
        h('span', { 'aria-hidden': 'true' }, face),
        h('span', { class: 'llmdebug-spoken' }, label),
      );
    return h(
      'div',
      { class: 'llmdebug-foot' },
      walker(T.previousRecord, '↑ p', -1, false),
      walker(T.nextRecord, '↓ n', 1, false),
      report ? walker(T.previousMismatch, '✗ ↑ P', -1, true) : null,
      report ? walker(T.nextMismatch, '✗ ↓ N', 1, true) : null,
      this.status.root,
      savable ? this.savers() : null,
    );
  }

  private savers(): HTMLElement {
    const saver = (kind: ExportRequest['kind']) => {
      const title = T.saveAs[kind];
      const props = { 'aria-label': `${T.kinds[kind]}: ${title}`, title };
      return button(() => void this.save(kind), props, T.kinds[kind]);
    };
    return h(
      'div',
      { class: 'llmdebug-savers', role: 'group', 'aria-label': T.save },
      `${T.saveFace} `,
      ...(['html', 'svg', 'png'] as const).map(saver),
    );
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
    this.stepper.show(this.position);
    this.layers?.show(this.position);
    this.rows.show(this.position, this.tree.selected);
  };

  private onSelected = (): void => {
    void this.panel.show(this.model.get('selected'));
    void this.follow(true);
  };

  private onPath = (): void => {
    if (this.model.get('path') !== (this.tree.selected?.path ?? ''))
      void this.go(this.model.get('path'));
  };

  /** List only the records of the module at `path`. */
  private async go(path: string): Promise<void> {
    this.under(path ? await this.tree.find(path) : null);
  }

  /** Select a layer's worst row at a step. If nothing was recorded there, go to the step. */
  private async jump({ path, node }: Layer, step: number, row: number): Promise<void> {
    if (row < 0) return this.set('position', step);
    this.narrow(node < 0 ? null : await this.tree.find(path));
    this.set('selected', row);
  }

  private under(node: TreeNode | null): void {
    this.narrow(node);
    void this.follow(false);
  }

  private narrow(node: TreeNode | null): void {
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
    let at = await this.where(row);
    if (at && at.index < 0 && must) {
      this.rows.clearFilter();
      this.narrow(null);
      at = await this.where(row);
    }
    if (!at?.row || row !== this.model.get('selected')) return;
    this.tree.pointAt(at.row.path);
    if (!this.opened) void this.tree.reveal(at.row.path);
    this.opened = true;
    if (must && moves === this.moves && at.row.step !== this.position)
      this.set('position', at.row.step);
    this.rows.select(row, this.rows.shows(at.row.step) ? at.index : -1);
  }

  private async where(row: number): Promise<Located | undefined> {
    return (await this.rpc.ask('row', { row, ...this.rows.filter }))?.answer;
  }

  /** Return the row to walk from: the selected one, or the edge of the step if it is elsewhere. */
  private async from(delta: 1 | -1): Promise<number> {
    const row = this.model.get('selected');
    const at = row < 0 ? undefined : await this.where(row);
    if (!at?.row || this.rows.shows(at.row.step)) return row;
    if (this.rows.filter.sort) return -1;
    const page = await this.rpc.ask('rows', { ...WHOLE, step: this.position, start: 0, n: 1 });
    const first = page?.answer.rows[0]?.id;
    if (first === undefined) return row;
    return delta > 0 ? first - 1 : first;
  }

  /** Select the next or previous record or mismatch, across steps. */
  private async walk(delta: 1 | -1, mismatch: boolean): Promise<void> {
    if (mismatch && this.overview.kind === 'run') return this.status.say(T.runHasNoMismatch);
    const filter = this.rows.filter;
    const row = await this.from(delta);
    if (row < 0 && (!mismatch || filter.sort)) return this.rows.start();
    const reply = await this.rpc.ask('locate', {
      ...filter,
      row,
      delta,
      mismatch: mismatch || filter.mismatch,
    });
    if (!reply) return;
    if (reply.answer.row) this.set('selected', reply.answer.row.id);
    else this.status.say(T.noFurther(mismatch || filter.mismatch));
  }
}
