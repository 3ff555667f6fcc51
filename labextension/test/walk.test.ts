import { expect, test, vi } from 'vitest';
import type { Rows } from '../src/widget/rows';
import * as T from '../src/widget/strings';
import { Walk } from '../src/widget/walk';
import { Kernel, row, settled } from './fakes';

const FILTER = { node: -1, mismatch: false, text: '', every: false, sort: '', descending: false };

/** Records 0 to 4 of step 0 and 5 to 9 of step 1, of which 3 and 7 diverged. */
function walk(selected: number, position = 0, report = true, filter = {}) {
  const step = (id: number) => Math.floor(id / 5);
  const kernel = new Kernel({
    rows: ({ step: of }) => ({ total: 5, start: 0, rows: [row(5 * of)], problem: '' }),
    locate: ({ row: from, delta, mismatch }) => {
      const all = mismatch ? [3, 7] : Array.from({ length: 10 }, (_, id) => id);
      const next = delta > 0 ? all.find(id => id > from) : all.reverse().find(id => id < from);
      return { row: next === undefined ? null : row(next, { step: step(next) }), index: 0 };
    },
  });
  const at = { selected, position };
  const say = vi.fn();
  const start = vi.fn();
  const rows = {
    filter: { ...FILTER, ...filter },
    isFiltered: false,
    start,
    shows: (one: number) => one === at.position,
    where: (id: number) => Promise.resolve({ row: row(id, { step: step(id) }), index: 0 }),
  };
  const go = (id: number) => void (at.selected = id);
  const made = new Walk(kernel.ask, rows as unknown as Rows, report, { here: () => at, go, say });
  return { made, kernel, at, say, start };
}

test('the next and the previous record are selected', async () => {
  const { made, at } = walk(2);
  await made.on(1, false);
  expect(at.selected).toBe(3);
  await made.on(-1, false);
  expect(at.selected).toBe(2);
});

test('mismatches are walked through across steps, and the end is said', async () => {
  const { made, at, say } = walk(0);
  await made.on(1, true);
  expect(at.selected).toBe(3);
  at.position = 1;
  await made.on(1, true);
  expect(at.selected).toBe(7);
  await made.on(1, true);
  expect([at.selected, say.mock.calls]).toEqual([7, [[T.noFurther(true, false)]]]);
});

test('a run has no mismatches, and says so without asking', async () => {
  const { made, kernel, say } = walk(0, 0, false);
  await made.on(1, true);
  expect([say.mock.calls, kernel.of('locate')]).toEqual([[[T.runHasNoMismatch]], []]);
});

test('without a selected record it begins with the first of the list', async () => {
  const { made, start } = walk(-1);
  await made.on(1, false);
  expect(start).toHaveBeenCalledOnce();
});

test('from a record of another step it goes on at the edge of this one', async () => {
  const next = walk(2, 1);
  await next.made.on(1, false);
  expect(next.at.selected).toBe(5);
  const previous = walk(2, 1);
  await previous.made.on(-1, false);
  expect(previous.at.selected).toBe(4);
});

test('a sorted list of another step begins at its top', async () => {
  const { made, start } = walk(2, 1, true, { sort: 'error' });
  await made.on(1, false);
  expect(start).toHaveBeenCalledOnce();
});

test('a record that is selected meanwhile stays selected', async () => {
  const { made, kernel, at } = walk(2);
  kernel.held = true;
  void made.on(1, false);
  await settled();
  at.selected = 8;
  await kernel.reply();
  expect(at.selected).toBe(8);
});
