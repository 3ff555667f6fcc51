import { expect, test } from 'vitest';
import { columnsOf, nextOrder, type Column, type Order } from '../src/widget/columns';

const UNSORTED: Order = { sort: '', descending: false };

function orders(column: Column): Order[] {
  const first = nextOrder(UNSORTED, column);
  const second = nextOrder(first, column);
  return [first, second, nextOrder(second, column)];
}

test('clicks on a figure sort from the largest, from the smallest, and not at all', () => {
  expect(orders({ name: 'error', width: 60, numeric: true })).toEqual([
    { sort: 'error', descending: true },
    { sort: 'error', descending: false },
    UNSORTED,
  ]);
});

test.each(['path', 'seq'] as const)('clicks on %s begin in ascending order', name => {
  const [first, second] = orders({ name, width: 0, numeric: name === 'seq' });
  expect([first?.descending, second?.descending]).toEqual([false, true]);
});

test('a click on another heading starts anew', () => {
  const order: Order = { sort: 'path', descending: true };
  expect(nextOrder(order, { name: 'op', width: 0 })).toEqual({ sort: 'op', descending: false });
});

test('only a report has verdicts, and only a list of all steps names the step', () => {
  const names = (report: boolean, every: boolean, ranked = false) =>
    columnsOf(report, every, ranked).map(column => column.name);
  expect(names(true, false)).toContain('verdict');
  expect(names(false, false)).not.toContain('verdict');
  expect(names(true, true)[0]).toBe('step');
  expect(names(true, false)).not.toContain('step');
  expect(names(true, false)).not.toContain('rank');
  expect(names(false, false, true)[0]).toBe('rank');
});
