/** The columns of the list of records, and how a click on a heading sorts them. */
import { LIST_COLUMNS, type ListColumn, type Listed, type Sort } from './wire';

/** A column, '' for execution order, and the direction. */
export type Order = Pick<Listed, 'sort' | 'descending'>;

/** `every`: the list holds the records of all steps. `ranked`: there are several ranks. */
export function columnsOf(report: boolean, every: boolean, ranked = false): ListColumn[] {
  const shown = { always: true, run: !report, report, every, ranked };
  return LIST_COLUMNS.filter(column => shown[column.when]);
}

/**
 * Return the order after a click on a heading.
 *
 * The first click sorts figures from the largest and all else from the first one, the second one
 * reverses that, the third one restores execution order.
 */
export function nextOrder({ sort, descending }: Order, { name, figure }: ListColumn): Order {
  if (sort !== name) return { sort: name as Sort, descending: figure };
  return descending === figure ? { sort, descending: !figure } : { sort: '', descending: false };
}
