/** The values of one tensor: which side, which slice, heat-map and histogram. */
import { h, swallow, uniqueId } from './dom';
import { Heatmap } from './heatmap';
import { Histogram } from './histogram';
import type { Ask } from './rpc';
import { Slices } from './slices';
import { SIDES, T } from './strings';
import type { Detail, Side, Which } from './wire';

export class Tensor {
  readonly root: HTMLElement;
  private uid = uniqueId();
  private tabs = h('div', { class: 'llmdebug-tabs', role: 'tablist', 'aria-label': T.sides, onkeydown: (event: KeyboardEvent) => this.key(event) });
  private why = h('p', { class: 'llmdebug-dim llmdebug-why' });
  private slices = new Slices(() => this.draw());
  private heatmap: Heatmap;
  private histogram: Histogram;
  private values: HTMLElement;
  private row = -1;
  private sides: Side[] = [];
  private preferred: Which = 'difference';
  private which: Which = 'golden';

  constructor(ask: Ask) {
    this.heatmap = new Heatmap(ask);
    this.histogram = new Histogram(ask);
    this.values = h('div', { class: 'llmdebug-values' }, this.slices.root, this.heatmap.root, this.histogram.root);
    this.root = h('div', { class: 'llmdebug-tensor' }, this.tabs,
      h('div', { id: this.uid, role: 'tabpanel' }, this.why, this.values));
  }

  /** The side that was looked at last is kept where the row has it. */
  show({ row, sides, axes }: Detail): void {
    this.row = row.id;
    this.sides = sides;
    this.slices.show(axes);
    const side = sides.find(one => one.which === this.preferred && one.kept) ?? sides.find(one => one.kept) ?? sides[0];
    if (side) this.open(side.which);
  }

  dispose(): void {
    this.heatmap.dispose();
  }

  private open(which: Which): void {
    this.which = which;
    const side = this.sides.find(one => one.which === which)!;
    const focused = this.tabs.contains(this.root.ownerDocument.activeElement);
    this.tabs.hidden = this.sides.length < 2;
    this.tabs.replaceChildren(...this.sides.map(one => this.tab(one.which)));
    if (focused) this.tabs.querySelector<HTMLElement>('[aria-selected=true]')?.focus();
    this.why.textContent = side.kept ? '' : side.why;
    this.why.hidden = side.kept;
    this.values.hidden = !side.kept;
    if (!side.kept) return;
    this.draw();
    void this.histogram.show(this.row, which);
  }

  private draw(): void {
    const { axes, fixed } = this.slices;
    this.heatmap.show({ row: this.row, which: this.which, axes: [...axes], fixed: [...fixed] });
  }

  private tab(which: Which): HTMLElement {
    const active = which === this.which;
    return h('button', {
      class: 'llmdebug-tab', type: 'button', role: 'tab', 'aria-selected': String(active), 'aria-controls': this.uid,
      tabindex: active ? 0 : -1, onclick: () => this.prefer(which),
    }, SIDES[which]);
  }

  private prefer(which: Which): void {
    this.preferred = which;
    this.open(which);
    this.tabs.querySelector<HTMLElement>('[aria-selected=true]')?.focus();
  }

  private key(event: KeyboardEvent): void {
    const delta = event.key === 'ArrowRight' ? 1 : event.key === 'ArrowLeft' ? -1 : 0;
    if (!delta) return;
    swallow(event);
    const at = this.sides.findIndex(side => side.which === this.which);
    this.prefer(this.sides[(at + delta + this.sides.length) % this.sides.length]!.which);
  }
}
