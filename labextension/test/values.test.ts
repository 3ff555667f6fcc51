import { expect, test } from 'vitest';
import { planes, type Values } from '../src/page/values';
import type { Heads, HeadsRequest, View, ViewRequest } from '../src/widget/wire';

/** Elements count from 0. */
const counting = (...shape: number[]): Values => ({
  shape,
  data: Float32Array.from({ length: shape.reduce((n, size) => n * size, 1) }, (_, i) => i),
});
const whole: ViewRequest = {
  ...{ op: 'view', row: 0, which: 'golden', axes: [0, 1], fixed: [0, 0] },
  ...{ y0: 0, x0: 0, y1: 0, x1: 0, size: 256 },
};
const heads: HeadsRequest = {
  ...{ op: 'heads', row: 0, which: 'golden', axis: 0, first: 0 },
  ...{ axes: [1, 2], fixed: [0, 0, 0], size: 40 },
};

function view(values: Values, more: Partial<ViewRequest> = {}) {
  const { answer, buffers } = planes(values, { ...whole, ...more });
  return { answer: answer as View, cells: [...new Float32Array(buffers[0]!.buffer)] };
}

test('a matrix is shown as it is', () => {
  const { answer, cells } = view(counting(2, 3));
  expect(cells).toEqual([0, 1, 2, 3, 4, 5]);
  expect(answer).toEqual({
    ...{ h: 2, w: 3, fy: 1, fx: 1, y0: 0, x0: 0, y1: 2, x1: 3, rows: 2, cols: 3 },
    ...{ lo: 0, hi: 5 },
  });
});

test('axes may be exchanged, and the others stand at their index', () => {
  expect(view(counting(2, 3), { axes: [1, 0] }).cells).toEqual([0, 3, 1, 4, 2, 5]);
  const { cells } = view(counting(2, 3, 2), { axes: [0, 2], fixed: [0, 1, 0] });
  expect(cells).toEqual([2, 3, 8, 9]); // of [i, 1, j], 6 i + 2 + j
});

test('an index beyond an axis is its last one', () => {
  const { cells } = view(counting(2, 1, 2), { axes: [1, 2], fixed: [9, 0, 0] });
  expect(cells).toEqual([2, 3]);
});

test('a vector is a row, a scalar a cell, and an empty tensor has none', () => {
  const vector = view(counting(3), { axes: [-1, 0], fixed: [0] });
  expect([vector.answer.rows, vector.cells]).toEqual([1, [0, 1, 2]]);
  expect(view(counting(), { axes: [-1, -1], fixed: [] }).cells).toEqual([0]);
  const { answer, cells } = view(counting(0, 3));
  expect([answer.h, cells, answer.lo, answer.hi]).toEqual([0, [], null, null]);
});

test('a window is cut out, up to the edges', () => {
  const { answer, cells } = view(counting(4, 4), { y0: 1, x0: 2, y1: 3, x1: 99 });
  expect(cells).toEqual([6, 7, 10, 11]);
  expect([answer.y1, answer.x1, answer.rows, answer.cols]).toEqual([3, 4, 4, 4]);
});

test('a cell of several elements shows the one of largest magnitude; NaN wins', () => {
  const values = counting(4, 4);
  values.data[0] = -9; // beats 1, 4 and 5
  values.data[7] = NaN;
  const { answer, cells } = view(values, { size: 2 });
  expect([answer.fy, answer.fx, answer.h, answer.w]).toEqual([2, 2, 2, 2]);
  expect(cells).toEqual([-9, NaN, 13, 15]);
  expect([answer.lo, answer.hi]).toEqual([-9, 15]);
});

test('NaN stays in its cell, whatever comes after it', () => {
  const values = { shape: [1, 4], data: new Float32Array([NaN, 7, 1, NaN]) };
  expect(view(values, { size: 2 }).cells).toEqual([NaN, NaN]);
});

test('the range is that of the finite values', () => {
  const values = { shape: [1, 4], data: new Float32Array([NaN, Infinity, -2, 1]) };
  const { answer } = view(values);
  expect([answer.lo, answer.hi]).toEqual([-2, 1]);
});

test('all slices along an axis have one range', () => {
  const { answer, buffers } = planes(counting(3, 1, 2), heads);
  expect(answer).toEqual({ h: 1, w: 2, first: 0, count: 3, total: 3, lo: 0, hi: 5 });
  expect([...new Float32Array(buffers[0]!.buffer)]).toEqual([0, 1, 2, 3, 4, 5]);
});

test('many slices are answered in pages of 64, beyond the last one in none', () => {
  const page = (first: number) => planes(counting(100, 1, 1), { ...heads, first });
  expect(page(64).answer as Heads).toMatchObject({ first: 64, count: 36, total: 100 });
  expect(new Float32Array(page(64).buffers[0]!.buffer)[0]).toBe(64);
  expect(page(0).answer as Heads).toMatchObject({ count: 64 });
  expect(page(200).answer as Heads).toMatchObject({ count: 0, h: 0, lo: null });
});
