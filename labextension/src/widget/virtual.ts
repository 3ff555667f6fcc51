/** A list of items of equal size. Only items in view exist in the DOM. */
import { h, hasFocus, morph } from './dom';
import { Scrolling } from './scrolling';

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
    const { extent } = this.scrolling;
    this.spacer.style[this.options.horizontal ? 'width' : 'height'] = `${extent}px`;
    this.refresh();
  }

  /** Paint the items in view. `anew` false: only those that were not in view before. */
  refresh(anew = true): void {
    const { horizontal, render, painted } = this.options;
    const { first, last, start } = this.scrolling.inView(this.scroll);
    [this.first, this.last] = [first, last];
    const hadFocus = hasFocus(this.body);
    this.paint(render, anew); // may measure the page, so it precedes the change of the layout
    this.body.style[horizontal ? 'left' : 'top'] = `${start}px`;
    painted?.(hadFocus);
  }

  /** Scroll an item into view. */
  reveal(index: number): void {
    const { scroll } = this;
    const to = this.scrolling.revealing(index, scroll);
    if (to !== scroll) this.scroll = to;
    this.refresh();
  }

  /** Return the item under a mouse event, even if it was repainted since the button went down. */
  indexAt(event: MouseEvent): number {
    const box = this.body.getBoundingClientRect();
    const offset = this.options.horizontal ? event.clientX - box.left : event.clientY - box.top;
    const index = this.first + Math.floor(offset / this.options.item);
    return offset >= 0 && index < this.last ? index : -1;
  }

  /** Number of items that PageUp and PageDown move by. */
  get page(): number {
    return Math.max(1, Math.floor(this.room / this.options.item) - 1);
  }

  dispose(): void {
    this.resize.disconnect();
    cancelAnimationFrame(this.frame);
  }

  /** Keep the elements of items that stay in view: replacing them would break a click. */
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

  private get scrolling(): Scrolling {
    return new Scrolling(this.options.item, this.count, this.room);
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
