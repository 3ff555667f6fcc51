/** The window of a slice that a heat map shows: zooming, panning, and its cells. */
import { clamp } from './dom';
import type { View } from './wire';

/** A range of rows and columns, in elements; the ends are exclusive. */
export interface Window {
  y0: number;
  x0: number;
  y1: number;
  x1: number;
}
/** An element of the slice. */
export interface Cell {
  y: number;
  x: number;
}
type Size = Pick<View, 'rows' | 'cols'>;

/** At most zoomed in, so many elements are in view. */
const LEAST_SPAN = 4;

/** Scale a window by `factor` around `at`, a place in it from 0 to 1. */
export function zoomed(window: Window, { rows, cols }: Size, factor: number, at: Cell): Window {
  const [y0, y1] = scaled(window.y0, window.y1, rows, factor, at.y);
  const [x0, x1] = scaled(window.x0, window.x1, cols, factor, at.x);
  return { y0, x0, y1, x1 };
}

function scaled(start: number, end: number, size: number, factor: number, at: number) {
  const span = clamp(Math.round((end - start) * factor), Math.min(LEAST_SPAN, size), size);
  const from = clamp(Math.round(start + at * (end - start) - at * span), 0, size - span);
  return [from, from + span] as const;
}

/** Move a window by whole elements, up to the edges of the slice. */
export function panned(window: Window, { rows, cols }: Size, dx: number, dy: number): Window {
  const x = clamp(Math.round(dx), -window.x0, cols - window.x1);
  const y = clamp(Math.round(dy), -window.y0, rows - window.y1);
  return { y0: window.y0 + y, x0: window.x0 + x, y1: window.y1 + y, x1: window.x1 + x };
}

/** Return the index of the first NaN, else of the largest magnitude. */
export function extreme(data: Float32Array): number {
  let best = 0;
  for (let i = 0; i < data.length; i++) {
    if (Number.isNaN(data[i])) return i;
    if (Math.abs(data[i]!) > Math.abs(data[best]!)) best = i;
  }
  return best;
}

/** Copy a message's buffer: unlike it, a `Float32Array` must start at a multiple of 4 bytes. */
export function floats(buffer: DataView | undefined): Float32Array<ArrayBuffer> {
  if (!buffer) return new Float32Array();
  const { byteOffset, byteLength } = buffer;
  return new Float32Array(buffer.buffer.slice(byteOffset, byteOffset + byteLength) as ArrayBuffer);
}
