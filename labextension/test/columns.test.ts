import { expect, test } from 'vitest';
import { columnsOf, nextOrder, type Order } from '../src/widget/columns';
import { LIST_COLUMNS, type ListColumn } from '../src/widget/wire';

const UNSORTED: Order = { sort: '', descending: false };

const named = (name: string): ListColumn => LIST_COLUMNS.find(column => column.name === name)!;

function orders(column: ListColumn): Order[] {
  const first = nextOrder(UNSORTED, column);
  const second = nextOrder(first, column);
  return [first, second, nextOrder(second, column)];
}

test('clicks on a figure sort from the largest, from the smallest, and not at all', () => {
  expect(orders(named('error'))).toEqual([
    { sort: 'error', descending: true },
    { sort: 'error', descending: false },
    UNSORTED,
  ]);
});

test.each(['path', 'seq', 'rank', 'step'])('clicks on %s begin in ascending order', name => {
  const [first, second] = orders(named(name));
  expect([first?.descending, second?.descending]).toEqual([false, true]);
});

test('a click on another heading starts anew', () => {
  const order: Order = { sort: 'path', descending: true };
  expect(nextOrder(order, named('op'))).toEqual({ sort: 'op', descending: false });
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
