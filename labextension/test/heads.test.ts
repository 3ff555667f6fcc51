// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { Heads } from '../src/widget/heads';
import type { Slice } from '../src/widget/heatmap';
import { drawing, Kernel, named, pixels, press, sent, settled, texts, type Drawn } from './fakes';

const SLICE: Slice = { row: 1, which: 'golden', axes: [1, 2], fixed: [1, 0, 0] };
const TOTAL: Record<number, number> = { 1: 3, 2: 150 };
let drawn: Drawn[];

beforeEach(() => (drawn = drawing()));
afterEach(() => void vi.restoreAllMocks());

function heads(open = true) {
  const kernel = new Kernel({
    heads: ({ row, first }) => {
      const total = TOTAL[row];
      if (!total) return undefined;
      const count = Math.min(64, total - first);
      const values = Float32Array.from({ length: count }, (_, i) => first + i);
      return sent({ h: 1, w: 1, first, count, total, lo: 0, hi: total - 1 }, values);
    },
  });
  const choose = vi.fn();
  const made = new Heads(kernel.ask, choose, open);
  document.body.replaceChildren(made.root);
  const show = async (more: Partial<Slice> = {}, axis = 0) => {
    made.show({ ...SLICE, ...more }, axis, 'head');
    await settled();
  };
  const grid = made.root.querySelector('[role=radiogroup]')!;
  const checked = () => grid.querySelector('[aria-checked=true]')?.getAttribute('aria-label');
  return { made, kernel, choose, show, grid, checked };
}

test('each slice is a picture with its number, the open one is checked', async () => {
  const { made, show, grid, checked } = heads();
  await show();
  expect(texts(grid, '[role=radio]')).toEqual(['0', '1', '2']);
  expect([checked(), made.root.hidden]).toEqual(['head 1', false]);
  expect(grid.getAttribute('aria-label')).toBe('All slices along head');
  expect(made.root.textContent).toContain('3, same colour scale');
});

test('all pictures have one colour scale', async () => {
  const { show } = heads();
  await show();
  const words = drawn.filter(one => one.name === 'putImageData').map(one => pixels([one])[0]);
  expect(new Set(words).size).toBe(3);
});

test('a click opens a slice, arrow keys the neighbours, Home and End the ends', async () => {
  const { show, grid, choose } = heads();
  await show();
  (grid.children[2] as HTMLElement).click();
  press(grid, 'ArrowLeft');
  press(grid, 'ArrowDown');
  press(grid, 'End');
  press(grid, 'Home');
  expect(choose.mock.calls.map(([axis, head]) => [axis, head] as number[])).toEqual([
    [0, 2],
    [0, 0],
    [0, 2],
    [0, 2],
    [0, 0],
  ]);
  expect(press(grid, 'ArrowLeft', { altKey: true }).defaultPrevented).toBe(false);
});

test('many slices are fetched in pages; the page of the open one is shown', async () => {
  const { made, kernel, show, grid, choose, checked } = heads();
  await show({ row: 2, fixed: [70, 0, 0] });
  expect(kernel.of('heads')[0]).toMatchObject({ axis: 0, first: 64, size: 40 });
  expect([texts(grid, '[role=radio]')[0], checked()]).toEqual(['64', 'head 70']);
  expect(made.root.textContent).toContain('64 to 127 of 150, same colour scale');
  named(made.root, 'Next slices').click();
  named(made.root, 'Previous slices').click();
  expect(choose.mock.calls).toEqual([
    [0, 128],
    [0, 0],
  ]);
  await show({ row: 2, fixed: [149, 0, 0] });
  expect(named(made.root, 'Next slices').disabled).toBe(true);
});

test('another slice of the same page is not fetched again', async () => {
  const { kernel, show, checked } = heads();
  await show();
  await show({ fixed: [2, 0, 0] });
  expect([kernel.of('heads').length, checked()]).toEqual([1, 'head 2']);
});

test('while they are folded nothing is fetched, and unfolding fetches', async () => {
  const { made, kernel, show, grid } = heads(false);
  await show();
  expect(kernel.of('heads')).toEqual([]);
  made.root.open = true;
  made.root.dispatchEvent(new Event('toggle'));
  await settled();
  expect(grid.childElementCount).toBe(3);
});

test('a tensor without other slices has none', async () => {
  const { made, kernel, show } = heads();
  await show({}, -1);
  expect([made.root.hidden, kernel.of('heads')]).toEqual([true, []]);
});

test('after an error no picture of the tensor before is left, and it is tried again', async () => {
  const { kernel, show, grid } = heads();
  await show();
  await show({ row: 9 });
  expect(grid.childElementCount).toBe(0);
  await show({ row: 9 });
  expect(kernel.of('heads').length).toBe(3);
});

test('the reply to an earlier tensor does not overwrite the later one', async () => {
  const { made, kernel, grid } = heads();
  kernel.held = true;
  made.show(SLICE, 0, 'head');
  made.show({ ...SLICE, row: 2, fixed: [64, 0, 0] }, 0, 'head');
  await kernel.reply();
  expect(texts(grid, '[role=radio]')[0]).toBe('64');
});

test('names of axes are text', () => {
  const { made, grid } = heads();
  made.show(SLICE, 0, '<b>head</b>');
  expect([made.root.querySelector('b'), grid.getAttribute('aria-label')]).toEqual([
    null,
    'All slices along <b>head</b>',
  ]);
});
