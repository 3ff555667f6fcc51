/** The values of a tensor: tabs for its sides, slices, heat maps, histograms, worst elements. */
import { button, h, swallow, uniqueId } from './dom';
import { Errors } from './errors';
import { Heads } from './heads';
import { Heatmap } from './heatmap';
import { Histogram } from './histogram';
import type { Ask } from './rpc';
import { Slices } from './slices';
import { SIDES } from './strings';
import * as T from './strings';
import { Trio } from './trio';
import type { Detail, Side, State, Tab, Which } from './wire';
import { Worst } from './worst';

/** The side and slice of a tensor that are shown. */
export type Look = Pick<State, 'which' | 'axes' | 'fixed'>;

export class Tensor {
  readonly root: HTMLElement;
  private uid = uniqueId();
  private tabs = h('div', {
    class: 'llmdebug-tabs',
    role: 'tablist',
    'aria-label': T.sides,
    onkeydown: (event: KeyboardEvent) => this.key(event),
  });
  private why = h('p', { class: 'llmdebug-dim llmdebug-why' });
  private slices = new Slices(() => this.draw());
  private heatmap: Heatmap;
  private heads: Heads;
  private histogram: Histogram;
  private trio: Trio;
  private errors: Errors;
  private worst: Worst;
  private pictures = h('div', { class: 'llmdebug-pictures' });
  private values: HTMLElement;
  /** The distribution of the differences, and the worst elements. */
  readonly figures: HTMLElement;
  private row = -1;
  private sides: Side[] = [];
  /** Number of tensors to show so far: the last one is shown. */
  private shown = 0;
  private preferred: Tab = 'difference';
  /** A saved state chose the slice. */
  private asked = false;
  private tab: Tab = 'golden';

  /** `report`: all three pictures, and the slice that differs most, come first. */
  constructor(
    ask: Ask,
    private report: boolean,
  ) {
    if (report) this.preferred = 'all';
    this.heatmap = new Heatmap(ask);
    this.heads = new Heads(ask, (axis, head) => this.stand(axis, head), report);
    this.histogram = new Histogram(ask);
    this.trio = new Trio(ask);
    this.errors = new Errors(ask);
    this.worst = new Worst(ask, index => this.find(index));
    this.values = h(
      'div',
      { class: 'llmdebug-values' },
      ...(report
        ? [this.heads.root, this.pictures, this.slices.root]
        : [this.slices.root, this.pictures, this.heads.root]),
    );
    this.figures = h('div', {}, this.errors.root, this.worst.root);
    this.root = h(
      'div',
      { class: 'llmdebug-tensor' },
      this.tabs,
      h('div', { id: this.uid, role: 'tabpanel' }, this.why, this.values),
      ...(report ? [] : [this.figures]),
    );
  }

  get look(): Look {
    return { which: this.tab, axes: [...this.slices.axes], fixed: [...this.slices.fixed] };
  }

  /** Show this side and slice of the first row, if it has them. */
  begin(look: Look): void {
    this.asked = look.axes.length > 0;
    this.preferred = look.which;
    this.slices.begin(look);
  }

  /** Show a row. The side stays the one that was chosen last, if the row has it. */
  show(detail: Detail): void {
    const { row, sides } = detail;
    const differing = sides.some(one => one.which === 'difference' && one.kept) ? row.id : -1;
    void this.errors.show(differing);
    const worst = this.worst.show(differing);
    if (sides.length) void this.openAt(detail, worst);
  }

  /** The side that was chosen last, if the row has it; else the first whose values were kept. */
  private get choice(): Tab {
    return (
      this.all.find(one => one === this.preferred && this.kept(one)) ??
      this.all.find(one => this.kept(one)) ??
      this.all[0]!
    );
  }

  /**
   * Open the chosen side; in a report at the worst element, if no state asked for another.
   *
   * Until that is known, all shows the tensor before: its slices and sides are not this one's.
   */
  private async openAt({ row, sides }: Detail, worst: Promise<number[] | undefined>) {
    const shown = ++this.shown;
    const wait = this.report && !this.asked && sides.some(one => one.axes.length > 2);
    const index = wait ? await worst : undefined;
    if (shown !== this.shown) return;
    this.row = row.id;
    this.sides = sides;
    const { choice } = this; // the user may have chosen another side since
    if (index) this.slices.stage(this.side(choice === 'all' ? 'golden' : choice)!.axes, index);
    this.open(choice);
  }

  dispose(): void {
    this.heatmap.dispose();
    this.trio.dispose();
    this.errors.dispose();
  }

  private side(which: Which): Side | undefined {
    return this.sides.find(one => one.which === which);
  }

  private kept(tab: Tab): boolean {
    return tab === 'all' || this.side(tab)?.kept === true;
  }

  /** The tabs. Side by side needs the values of both sides, with equal shapes. */
  private get all(): Tab[] {
    const [golden, mine] = [this.side('golden'), this.side('mine')];
    const together =
      golden && mine && this.kept('difference') && golden.shape.join() === mine.shape.join();
    return [...this.sides.map(one => one.which), ...(together ? ['all' as const] : [])];
  }

  private open(tab: Tab): void {
    this.tab = tab;
    const focused = this.tabs.contains(this.root.ownerDocument.activeElement);
    this.tabs.hidden = this.sides.length < 2;
    this.tabs.replaceChildren(...this.all.map(one => this.button(one)));
    if (focused) this.tabs.querySelector<HTMLElement>('[aria-selected=true]')?.focus();
    const why = tab === 'all' || this.kept(tab) ? '' : this.side(tab)!.why;
    this.why.textContent = why;
    this.why.hidden = this.kept(tab);
    this.values.hidden = !this.kept(tab);
    if (!this.kept(tab)) return;
    this.slices.show(this.side(tab === 'all' ? 'golden' : tab)!.axes);
    this.pictures.replaceChildren(
      ...(tab === 'all' ? [this.trio.root] : [this.heatmap.root, this.histogram.root]),
    );
    this.draw();
    if (tab !== 'all') void this.histogram.show(this.row, tab);
  }

  private draw(): void {
    const { axes, fixed } = this.slices;
    const [down, right] = axes;
    const names: [string, string] = [this.slices.name(down), this.slices.name(right)];
    const slice = { row: this.row, axes: [...axes], fixed: [...fixed], names };
    if (this.tab === 'all') this.trio.show(slice, this.sides);
    else this.heatmap.show({ ...slice, which: this.tab });
    const heads = this.slices.heads;
    this.heads.show(
      { ...slice, which: this.tab === 'all' ? 'difference' : this.tab },
      heads,
      this.slices.name(heads),
    );
  }

  private stand(axis: number, index: number): void {
    this.slices.stand(axis, index);
    this.draw();
  }

  /** Show an element. If the two layouts differ, its index belongs to the difference. */
  private find(index: number[]): void {
    if (!this.all.includes('all')) this.open('difference');
    this.slices.at(index);
    this.draw();
    const [row, column] = this.slices.axes;
    const at = { y: index[row] ?? 0, x: index[column] ?? 0 };
    if (this.tab === 'all') this.trio.mark(at);
    else void this.heatmap.mark(at);
  }

  private button(tab: Tab): HTMLElement {
    const active = tab === this.tab;
    return button(
      () => this.prefer(tab),
      {
        class: 'llmdebug-tab',
        role: 'tab',
        'aria-selected': String(active),
        'aria-controls': this.uid,
        tabindex: active ? 0 : -1,
      },
      tab === 'all' ? T.sideBySide : SIDES[tab],
    );
  }

  private prefer(tab: Tab): void {
    this.preferred = tab;
    this.open(tab);
    this.tabs.querySelector<HTMLElement>('[aria-selected=true]')?.focus();
  }

  private key(event: KeyboardEvent): void {
    const delta = event.key === 'ArrowRight' ? 1 : event.key === 'ArrowLeft' ? -1 : 0;
    if (!delta) return;
    swallow(event);
    const tabs = this.all;
    this.prefer(tabs[(tabs.indexOf(this.tab) + delta + tabs.length) % tabs.length]!);
  }
}
