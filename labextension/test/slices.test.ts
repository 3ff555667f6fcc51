// @vitest-environment happy-dom
import { expect, test, vi } from 'vitest';
import { Slices } from '../src/widget/slices';

const axes = (...sizes: number[]) => sizes.map(size => ({ name: '', size }));
const HEADED = [
  { name: 'batch', size: 100 },
  { name: 'head', size: 8 },
  { name: 'query', size: 12 },
  { name: 'key', size: 12 },
];

function slices(...sizes: number[]) {
  const changed = vi.fn();
  const made = new Slices(changed);
  made.show(axes(...sizes));
  return { made, changed };
}

test('a slice begins with the last two axes; a vector has columns only', () => {
  expect(slices(2, 3, 4).made.axes).toEqual([1, 2]);
  expect(slices(5).made.axes).toEqual([-1, 0]);
});

test('a tensor of equal shape keeps the slice, another one starts anew', () => {
  const { made } = slices(2, 3, 4);
  made.at([1, 2, 3]);
  made.show(axes(2, 3, 4));
  expect(made.fixed).toEqual([1, 2, 3]);
  made.show(axes(2, 3, 5));
  expect(made.fixed).toEqual([0, 0, 0]);
});

test('a saved slice is shown once, and only if its number of axes fits', () => {
  const made = new Slices(() => undefined);
  made.begin({ axes: [0, 2], fixed: [0, 1, 0] });
  made.show(axes(2, 3, 4));
  expect([made.axes, made.fixed]).toEqual([
    [0, 2],
    [0, 1, 0],
  ]);
  made.begin({ axes: [0, 1], fixed: [0, 0] });
  made.show(axes(4, 5, 6));
  expect(made.axes).toEqual([1, 2]);
});

test('an index of another shape is ignored', () => {
  const { made } = slices(2, 3, 4);
  made.at([1, 1]);
  expect(made.fixed).toEqual([0, 0, 0]);
});

test('the thumbnails show the heads, else the longest axis outside the slice', () => {
  const made = new Slices(() => undefined);
  made.show(HEADED);
  expect([made.heads, made.name(made.heads)]).toEqual([1, 'head']);
  made.axes = [1, 3];
  expect(made.name(made.heads)).toBe('batch');
  expect(slices(1, 3, 4).made.heads).toBe(-1);
});

test('choosing the axis of the columns for the rows swaps them', () => {
  const { made, changed } = slices(2, 3, 4);
  const rows = made.root.querySelector('select')!;
  rows.value = '2';
  rows.dispatchEvent(new Event('change'));
  expect([made.axes, changed.mock.calls.length]).toEqual([[2, 1], 1]);
});

test.each([
  ['99', 1],
  ['-5', 0],
  ['0.6', 1],
  ['x', 0],
])('an index of %s becomes %i', (text, index) => {
  const { made } = slices(2, 3, 4);
  const number = made.root.querySelector<HTMLInputElement>('input[type=number]')!;
  Object.defineProperty(number, 'value', { value: text, writable: true });
  number.dispatchEvent(new Event('change'));
  expect(made.fixed[0]).toBe(index);
});
