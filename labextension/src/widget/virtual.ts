/** A list of equally large items, of which only those in view exist in the DOM. */
import { clamp, h, hasFocus, morph } from './dom';

const MARGIN = 6;
/** Browsers stop at some 17 million pixels; beyond this, scrolling is scaled. */
const LONGEST = 8_000_000;

export interface VirtualOptions {
  item: number;
  horizontal?: boolean;
  head?: HTMLElement;
  render: (index: number) => HTMLElement;
  painted?: (hadFocus: boolean) => void;
}

export class VirtualList {
  readonly root = h('div', { class: 'llmdebug-scroll', tabindex: 0 });
  first = 0;
  last = 0;
  count = 0;
  private spacer = h('div', { class: 'llmdebug-spacer', role: 'presentation' });
  private body = h('div', { class: 'llmdebug-items', role: 'presentation' });
  private resize = new ResizeObserver(() => this.refresh());
  private frame = 0;
  private items = new Map<number, HTMLElement>();

  constructor(private options: VirtualOptions) {
    this.spacer.append(this.body);
    if (options.head) this.root.append(options.head);
    this.root.append(this.spacer);
    this.root.addEventListener('scroll', this.schedule, { passive: true });
    this.resize.observe(this.root);
  }

  setCount(count: number): void {
    this.count = count;
    this.spacer.style[this.options.horizontal ? 'width' : 'height'] = `${this.extent}px`;
    this.refresh();
  }

  /** Paint what is in view; `anew` false: what stays in view is as it was. */
  refresh(anew = true): void {
    const { item, horizontal, render, painted } = this.options;
    const scroll = this.scroll * this.scale;
    this.first = clamp(Math.floor(scroll / item) - MARGIN, 0, this.count);
    this.last = clamp(Math.ceil((scroll + this.room) / item) + MARGIN, this.first, this.count);
    const start = `${this.first * item - scroll + this.scroll}px`;
    const hadFocus = hasFocus(this.body);
    this.paint(render, anew); // may ask for sizes, so the page is changed after it
    this.body.style[horizontal ? 'left' : 'top'] = start;
    painted?.(hadFocus);
  }

  /** Have the item in view: scroll on by a neighbour, bring a farther one to the middle. */
  reveal(index: number): void {
    const { item } = this.options;
    const start = index * item;
    const room = this.room;
    const from = this.scroll * this.scale;
    const gap = start < from ? from - start : start + item - from - room;
    if (gap > 2 * item) this.scroll = (start - (room - item) / 2) / this.scale;
    else if (start < from) this.scroll = start / this.scale;
    else if (gap > 0) this.scroll = (start + item - room) / this.scale;
    this.refresh();
  }

  /** Which item a mouse event hits, even when the item was painted anew since the button went down. */
  indexAt(event: MouseEvent): number {
    const box = this.body.getBoundingClientRect();
    const offset = this.options.horizontal ? event.clientX - box.left : event.clientY - box.top;
    const index = this.first + Math.floor(offset / this.options.item);
    return offset >= 0 && index < this.last ? index : -1;
  }

  /** Items in view, for PageUp and PageDown. */
  get page(): number {
    return Math.max(1, Math.floor(this.room / this.options.item) - 1);
  }

  dispose(): void {
    this.resize.disconnect();
    cancelAnimationFrame(this.frame);
  }

  /** Elements of items that stay in view stay, or a click begun before a repaint would be lost. */
  private paint(render: (index: number) => HTMLElement, anew: boolean): void {
    const before = this.items;
    this.items = new Map();
    for (let i = this.first; i < this.last; i++) {
      const old = before.get(i);
      this.items.set(i, !old ? render(i) : anew ? morph(old, render(i)) : old);
    }
    for (const [i, old] of before) if (!this.items.has(i)) old.remove();
    let next = this.body.firstChild;
    for (const el of this.items.values())
      if (el === next) next = next.nextSibling;
      else this.body.insertBefore(el, next);
  }

  private get extent(): number {
    return Math.min(LONGEST, this.count * this.options.item);
  }

  private get scale(): number {
    const travel = this.extent - this.room;
    return travel > 0 ? (this.count * this.options.item - this.room) / travel : 1;
  }

  private get room(): number {
    const { horizontal, head } = this.options;
    return horizontal ? this.root.clientWidth : this.root.clientHeight - (head?.offsetHeight ?? 0);
  }

  private get scroll(): number {
    return this.options.horizontal ? this.root.scrollLeft : this.root.scrollTop;
  }

  private set scroll(pixels: number) {
    if (this.options.horizontal) this.root.scrollLeft = pixels;
    else this.root.scrollTop = pixels;
  }

  private schedule = (): void => {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.refresh(false));
  };
}
