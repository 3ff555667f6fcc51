/** The columns of the list of records, and how a click on a heading sorts them. */
import * as T from './strings';
import type { Listed, Sort } from './wire';

export interface Column {
  name: keyof typeof T.columns;
  /** In pixels; 0: the remaining space. */
  width: number;
  numeric?: boolean;
}
/** A column, '' for execution order, and the direction. */
export type Order = Pick<Listed, 'sort' | 'descending'>;

const FIGURE = { width: 60, numeric: true };
const STEP: Column = { name: 'step', width: 78 };
const RANK: Column = { name: 'rank', width: 40, numeric: true };
const COMMON: Column[] = [
  { name: 'seq', width: 46, numeric: true },
  { name: 'path', width: 0 },
  { name: 'op', width: 70 },
  { name: 'dtype', width: 42 },
  { name: 'shape', width: 84 },
];
const OF_RUN: Column[] = (['min', 'max', 'mean', 'l2norm'] as const).map(name => ({
  name,
  ...FIGURE,
}));
const OF_REPORT: Column[] = [
  { name: 'error', ...FIGURE },
  { name: 'limit', ...FIGURE },
  { name: 'verdict', width: 124 },
];

/** `every`: the list holds the records of all steps. `ranked`: there are several ranks. */
export function columnsOf(report: boolean, every: boolean, ranked = false): Column[] {
  return [
    ...(every ? [STEP] : []),
    ...(ranked ? [RANK] : []),
    ...COMMON,
    ...(report ? OF_REPORT : OF_RUN),
  ];
}

/**
 * Return the order after a click on a heading.
 *
 * The first click sorts figures from the largest and text from A, the second one reverses that,
 * the third one restores execution order.
 */
export function nextOrder({ sort, descending }: Order, { name, numeric }: Column): Order {
  const first = numeric === true && name !== 'seq' && name !== 'rank';
  if (sort !== name) return { sort: name as Sort, descending: first };
  return descending === first ? { sort, descending: !first } : { sort: '', descending: false };
}
