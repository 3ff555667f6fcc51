/** Which items of a long list are in view, and where to scroll to show one. */
import { clamp } from './dom';

const MARGIN = 6;
/** Browsers limit an element to some 17 million pixels. Beyond this length, scrolling is scaled. */
const LONGEST = 8_000_000;

/** A list of `count` items of `item` pixels each, seen through `room` pixels. */
export class Scrolling {
  /** Length of the scrolled element in pixels. */
  readonly extent: number;
  /** Pixels of the list per pixel of scrolling. */
  private readonly scale: number;

  constructor(
    private item: number,
    private count: number,
    private room: number,
  ) {
    const length = count * item;
    this.extent = Math.min(LONGEST, length);
    this.scale = this.extent > room ? (length - room) / (this.extent - room) : 1;
  }

  /** Return the items to paint, some beyond the edges included, and where the first one starts. */
  inView(scroll: number): { first: number; last: number; start: number } {
    const { item, count, room } = this;
    const from = scroll * this.scale;
    const first = clamp(Math.floor(from / item) - MARGIN, 0, count);
    const last = clamp(Math.ceil((from + room) / item) + MARGIN, first, count);
    return { first, last, start: first * item - from + scroll };
  }

  /** Return the offset that shows an item: nearby ones at the edge, others in the middle. */
  revealing(index: number, scroll: number): number {
    const { item, room } = this;
    const start = index * item;
    const from = scroll * this.scale;
    const gap = Math.max(from - start, start + item - from - room);
    if (gap <= 0) return scroll;
    if (gap > 2 * item) return (start - (room - item) / 2) / this.scale;
    return (start < from ? start : start + item - room) / this.scale;
  }
}
