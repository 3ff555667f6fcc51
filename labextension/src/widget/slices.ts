/** Chooses a 2-d slice of a tensor: its row and column axes, and an index on the other axes. */
import { clamp, h } from './dom';
import * as T from './strings';
import type { Axis, State } from './wire';

export class Slices {
  readonly root = h('div', { class: 'llmdebug-slices', role: 'group', 'aria-label': T.axes });
  axes: [number, number] = [-1, -1];
  fixed: number[] = [];
  private shape: Axis[] = [];
  private first: Pick<State, 'axes' | 'fixed'> | null = null;

  constructor(private changed: () => void) {}

  /** Show this slice of the first tensor, if it has the same number of axes. */
  begin(slice: Pick<State, 'axes' | 'fixed'>): void {
    this.first = slice;
  }

  /** Show a tensor. The slice stays for equal shapes, so that records can be compared. */
  show(shape: Axis[]): void {
    const same =
      shape.length === this.shape.length &&
      shape.every((axis, i) => axis.size === this.shape[i]!.size);
    this.shape = shape;
    if (!same) {
      this.axes = [shape.length < 2 ? -1 : shape.length - 2, shape.length - 1];
      this.fixed = shape.map(() => 0);
    }
    const first = this.first;
    this.first = null;
    if (first?.axes.length === 2 && first.fixed.length === shape.length) {
      this.axes = [first.axes[0]!, first.axes[1]!];
      this.fixed = [...first.fixed];
    }
    this.paint();
  }

  /** Prepare a tensor so that it opens at the slice of an element. */
  stage(shape: Axis[], index: number[] | undefined): void {
    if (index?.length !== shape.length) return;
    const axes = [shape.length < 2 ? -1 : shape.length - 2, shape.length - 1];
    this.first = { axes, fixed: [...index] };
  }

  /** Go to the slice of an element. */
  at(index: number[]): void {
    if (index.length !== this.shape.length) return;
    this.fixed = [...index];
    this.paint();
  }

  /** Go to an index on one axis. */
  stand(axis: number, index: number): void {
    this.fixed[axis] = index;
    this.paint();
  }

  /** The axis to show thumbnails of: the heads, else the longest one outside the slice, or -1. */
  get heads(): number {
    const beside = this.shape
      .map((_, axis) => axis)
      .filter(axis => this.shape[axis]!.size > 1 && !this.axes.includes(axis));
    const length = (axis: number) =>
      this.shape[axis]!.name === 'head' ? Infinity : this.shape[axis]!.size;
    return beside.reduce(
      (best, axis) => (best < 0 || length(axis) > length(best) ? axis : best),
      -1,
    );
  }

  name(axis: number): string {
    return this.shape[axis]?.name || String(axis);
  }

  private paint(): void {
    this.root.hidden = this.shape.length < 3;
    if (this.root.hidden) return this.root.replaceChildren();
    this.root.replaceChildren(
      this.chooser(T.rowAxis, 0),
      this.chooser(T.columnAxis, 1),
      ...this.shape.flatMap(({ size }, axis) =>
        size < 2 || this.axes.includes(axis) ? [] : [this.index(axis)],
      ),
    );
  }

  private chooser(label: string, at: 0 | 1): HTMLElement {
    const select = h(
      'select',
      { 'aria-label': label, onchange: () => this.assign(at, Number(select.value)) },
      ...this.shape.map((axis, i) =>
        h('option', { value: i, selected: i === this.axes[at] }, `${this.name(i)} (${axis.size})`),
      ),
    );
    return h('label', {}, `${label} `, select);
  }

  /** Choose the row (0) or column (1) axis. If it is the other one's, they swap. */
  private assign(at: 0 | 1, axis: number): void {
    if (this.axes[1 - at] === axis) this.axes[1 - at] = this.axes[at]!;
    this.axes[at] = axis;
    this.paint();
    this.changed();
  }

  private index(axis: number): HTMLElement {
    const last = Math.max(0, this.shape[axis]!.size - 1);
    const props = {
      min: 0,
      max: last,
      value: this.fixed[axis]!,
      'aria-label': T.axisIndex(this.name(axis)),
    };
    const set = (text: string) => {
      this.fixed[axis] = clamp(Math.round(Number(text)) || 0, 0, last);
      number.value = range.value = String(this.fixed[axis]);
      this.changed();
    };
    const number = h('input', { type: 'number', ...props, onchange: () => set(number.value) });
    const range = h('input', { type: 'range', ...props, oninput: () => set(range.value) });
    return h(
      'div',
      { class: 'llmdebug-axis' },
      h('span', {}, this.name(axis)),
      range,
      number,
      h('span', { class: 'llmdebug-dim' }, `/ ${last}`),
    );
  }
}
