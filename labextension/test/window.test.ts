import { expect, test } from 'vitest';
import { extreme, floats, panned, zoomed } from '../src/widget/window';

const SIZE = { rows: 100, cols: 40 };
const WHOLE = { y0: 0, x0: 0, y1: 100, x1: 40 };

test('zooming keeps the element under the pointer in place', () => {
  expect(zoomed(WHOLE, SIZE, 0.5, { y: 0.5, x: 0 })).toEqual({ y0: 25, y1: 75, x0: 0, x1: 20 });
});

test('zooming in stops at four elements, zooming out at the whole slice', () => {
  const small = { y0: 10, x0: 10, y1: 14, x1: 14 };
  expect(zoomed(small, SIZE, 0.5, { y: 0.5, x: 0.5 })).toEqual(small);
  expect(zoomed(small, SIZE, 1000, { y: 0.5, x: 0.5 })).toEqual(WHOLE);
});

test('a slice with fewer than four rows keeps all of them', () => {
  const { y0, y1 } = zoomed({ y0: 0, x0: 0, y1: 2, x1: 40 }, { rows: 2, cols: 40 }, 0.5, {
    y: 1,
    x: 1,
  });
  expect([y0, y1]).toEqual([0, 2]);
});

test('panning stops at the edges and keeps the size of the window', () => {
  const window = { y0: 10, x0: 10, y1: 20, x1: 20 };
  expect(panned(window, SIZE, -1000, 1000)).toEqual({ y0: 90, y1: 100, x0: 0, x1: 10 });
});

test('a cell shows its first NaN, else the value of largest magnitude', () => {
  expect(extreme(new Float32Array([1, -7, 3]))).toBe(1);
  expect(extreme(new Float32Array([1, NaN, Infinity, NaN]))).toBe(1);
});

test('a buffer at an odd offset is read, and no buffer is an empty array', () => {
  const message = new Uint8Array(7);
  message.set(new Uint8Array(new Float32Array([1.5]).buffer), 3);
  expect([...floats(new DataView(message.buffer, 3))]).toEqual([1.5]);
  expect(floats(undefined)).toHaveLength(0);
});
