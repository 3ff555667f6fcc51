/**
 * The debugger: token stepper, model tree, records and tensor, kept in step.
 *
 * `position`, `selected` and `path` are traits of the Python widget. Whoever changes one, page or
 * kernel, the view follows in the trait's change event.
 */
import type { AnyModel } from '@anywidget/types';
import { clamp, h } from './dom';
import { header } from './header';
import { onKeys } from './keys';
import { Layers } from './layers';
import { Panel } from './panel';
import { Rows, WHOLE } from './rows';
import { Rpc, type Wait } from './rpc';
import { Status } from './status';
import { Stepper } from './stepper';
import { T } from './strings';
import { Tree } from './tree';
import type { ExportRequest, Layer, Located, Overview, State, TreeNode } from './wire';

export interface Traits {
  snapshot: Overview;
  position: number;
  selected: number;
  path: string;
  /** In a saved page: how the explorer stood. */
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
  /** The tree unfolds to the record that the explorer opens with, and from then on as the user likes. */
  private opened = false;
  /** How often the position changed: an answer that took long must not undo what was done since. */
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
      took: judged => this.take(judged),
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
    void this.tree.start(); // behind the records: of a large model the kernel takes longer for it
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
      took: judged => this.take(judged),
    });
  }

  /** What the kernel judged anew: it may have sent it by itself, and where nothing does, the page does. */
  private take(judged: Overview): void {
    this.status.say(judged.marks.length < this.overview.marks.length ? T.unmarkedNow : T.markedNow);
    this.model.set('snapshot', judged);
  }

  /** All that shows a verdict follows, and stays where it is: position, selection, what is unfolded, the focus. */
  private onSnapshot = (): void => {
    this.overview = this.model.get('snapshot');
    const key = (this.head.getRootNode() as Document | ShadowRoot).activeElement?.closest(
      '.llmdebug-expect, [data-mark]',
    );
    const focused = (
      key?.matches('[data-mark]') ? key : key?.querySelector('[data-mark]')
    )?.getAttribute('data-mark');
    const open = new Map(
      [...this.head.querySelectorAll('details')].map(one => [one.dataset.open, one.open]),
    );
    const fresh = this.header();
    fresh
      .querySelectorAll('details')
      .forEach(one => (one.open = open.get(one.dataset.open) ?? one.open));
    this.head.replaceWith(fresh);
    this.head = fresh;
    this.stepper.take(this.overview.steps);
    void this.layers?.reload();
    void this.tree.reload();
    this.rows.refresh();
    void this.follow(false);
    void this.panel.show(this.model.get('selected')).then(() => {
      if (focused)
        this.head.parentElement?.querySelector<HTMLElement>(`[data-mark='${focused}']`)?.focus();
    });
  };

  /** What would be asked of a kernel that isn't there can't be pressed. */
  private wait(wait: Wait): void {
    this.status.wait(wait);
    this.controls.disabled = wait === 'dead' || wait === 'gone';
  }

  private bar(report: boolean, savable: boolean): HTMLElement {
    const button = (label: string, face: string, delta: 1 | -1, mismatch: boolean) =>
      h(
        'button',
        {
          class: 'llmdebug-button',
          type: 'button',
          title: label,
          onclick: () => void this.walk(delta, mismatch),
        },
        h('span', { 'aria-hidden': 'true' }, face),
        h('span', { class: 'llmdebug-spoken' }, label),
      );
    return h(
      'div',
      { class: 'llmdebug-foot' },
      button(T.previousRecord, '↑ p', -1, false),
      button(T.nextRecord, '↓ n', 1, false),
      report ? button(T.previousMismatch, '✗ ↑ P', -1, true) : null,
      report ? button(T.nextMismatch, '✗ ↓ N', 1, true) : null,
      this.status.root,
      savable ? this.savers() : null,
    );
  }

  private savers(): HTMLElement {
    return h(
      'div',
      { class: 'llmdebug-savers', role: 'group', 'aria-label': T.save },
      `${T.saveFace} `,
      ...(['html', 'svg', 'png'] as const).map(kind =>
        h(
          'button',
          {
            class: 'llmdebug-button',
            type: 'button',
            'aria-label': `${T.kinds[kind]}: ${T.saveAs[kind]}`,
            title: T.saveAs[kind],
            onclick: () => void this.save(kind),
          },
          T.kinds[kind],
        ),
      ),
    );
  }

  /** The kernel writes the file: only it knows the folder, and a page may be kept from saving anything. */
  private async save(kind: ExportRequest['kind']): Promise<void> {
    const { mismatch, text } = this.rows.filter;
    const [position, selected, path] = [
      this.position,
      this.model.get('selected'),
      this.model.get('path'),
    ];
    const reply = await this.rpc.ask('export', {
      kind,
      position,
      selected,
      path,
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
      if (name === 'selected') this.onSelected(); // asked for again: the list may stand elsewhere
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

  /** Narrow the list to the module at `path`. */
  private async go(path: string): Promise<void> {
    this.under(path ? await this.tree.find(path) : null);
  }

  /** To a layer's worst row at a step; where nothing was recorded, to the step. */
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

  /** Bring the list to the selected record; `must`: drop the filters if they hide it. */
  private async follow(must: boolean): Promise<void> {
    const row = this.model.get('selected');
    if (row < 0) {
      this.tree.pointAt(null);
      return this.rows.select(-1, -1);
    }
    if (this.rows.has(row) && !this.rows.filter.every) return; // of all tokens, the position may have to follow
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

  /** Where to walk from: the selected record, or the edge of the step in view if that is another one. */
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

  /** To the next or previous record, or mismatch, from the selected one, across steps. */
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
