import { expect, test } from 'vitest';
import { Saved } from '../src/page/saved';
import type { Ops, Row, SavedPage } from '../src/widget/wire';

const row = (id: number, more: Partial<Row>): Row => ({
  ...({ step: 0, role: 'output', slot: '0', op: 'Linear', dtype: 'float32' } as Row),
  ...{ shape: [2], nan: 0, inf: 0, verdict: 'match', error: null },
  id,
  ...more,
});

/** A report with the modules `a`, `a.b` and `c`, and a 2 by 3 tensor in row 1. */
function page(more: Partial<SavedPage> = {}): Saved {
  const values = new Float32Array([1, 2, 3, 4, -9, 6]);
  const text = btoa(String.fromCharCode(...new Uint8Array(values.buffer)));
  const paths = ['a', 'a.b', 'c'];
  return new Saved({
    snapshot: { kind: 'report' },
    nodes: paths.map((path, id) => ({ id, path })),
    parents: [-1, 0, -1],
    rows: [
      row(1, { path: 'a', error: 0.5, verdict: 'diverged' }),
      row(2, { path: 'a.b', error: 2 }),
      row(3, { path: 'c', step: 1, role: 'input', verdict: 'unmatched' }),
      row(4, { path: 'c', step: 1, error: 1, nan: 3 }),
    ],
    homes: [0, 1, 2, 2],
    answers: [{ key: 'array 1 mine', answer: { shape: [2, 3] }, buffers: [text] }],
    ...more,
  } as unknown as SavedPage);
}

const ALL = { node: -1, mismatch: false, text: '', every: true, sort: '', descending: false };

interface Answer {
  re: number;
  error?: string;
  buffers: DataView[];
}

function ask<K extends keyof Ops>(saved: Saved, op: K, request: object) {
  return new Promise<Answer & Ops[K]['answer']>(resolve => {
    saved.onMessage = (message, buffers) => resolve({ ...message, buffers } as never);
    saved.send({ op, re: 5, ...request });
  });
}

async function ids(request: object, saved = page()): Promise<number[]> {
  const { rows } = await ask(saved, 'rows', { ...ALL, step: 0, start: 0, n: 9, ...request });
  return rows.map(one => one.id);
}

test('rows are filtered by step, module, verdict and words', async () => {
  expect(await ids({ every: false })).toEqual([1, 2]);
  expect(await ids({ every: false, step: 1 })).toEqual([3, 4]);
  expect(await ids({ node: 0 })).toEqual([1, 2]);
  expect(await ids({ mismatch: true })).toEqual([1, 3]);
  expect(await ids({ text: 'LINEAR in[0]' })).toEqual([3]);
});

test('a run has no verdicts: its mismatches are rows with NaN or inf', async () => {
  const run = page({ snapshot: { kind: 'run' } as SavedPage['snapshot'] });
  expect(await ids({ mismatch: true }, run)).toEqual([4]);
});

test('sorted rows without a value come last in both directions', async () => {
  expect(await ids({ sort: 'error' })).toEqual([1, 4, 2, 3]);
  expect(await ids({ sort: 'error', descending: true })).toEqual([2, 4, 1, 3]);
});

test.each(['nan', 'max>1', 'id:3_1'])(
  'the filter %s is refused: it needs the kernel',
  async text => {
    const { problem, total } = await ask(page(), 'rows', { ...ALL, step: 0, start: 0, n: 9, text });
    expect([problem === '', total]).toEqual([false, 0]);
  },
);

test('ranks are chosen as by the kernel', async () => {
  const rows = [0, 1, 2].map(rank => row(rank, { rank, path: `layers.${rank % 2}.up` }));
  const ranked = page({ rows, homes: [0, 0, 0] });
  expect(await ids({ text: 'rank:1' }, ranked)).toEqual([1]);
  expect(await ids({ text: 'rank:0 rank:2 up' }, ranked)).toEqual([0, 2]);
  expect(await ids({ text: 'rank:2 layers.1' }, ranked)).toEqual([]);
});

test('a window of the list has its place and the number of all rows', async () => {
  const answer = await ask(page(), 'rows', { ...ALL, step: 0, start: 1, n: 2 });
  expect([answer.re, answer.total, answer.start]).toEqual([5, 4, 1]);
  expect(answer.rows.map(one => one.id)).toEqual([2, 3]);
});

test('walking goes to the neighbour in the list, and ends at its ends', async () => {
  const next = async (from: number, delta: number, more = {}) =>
    (await ask(page(), 'locate', { ...ALL, row: from, delta, ...more })).row?.id ?? null;
  expect(await next(1, 1, { mismatch: true })).toBe(3);
  expect(await next(2, 1, { mismatch: true })).toBe(3); // from a row outside the list
  expect(await next(-1, -1)).toBe(4);
  expect(await next(4, 1)).toBeNull();
});

test('a path leads to its module, else to the nearest existing ancestor', async () => {
  expect((await ask(page(), 'path', { path: 'a.b/Torch.addmm' })).ids).toEqual([0, 1]);
  expect((await ask(page(), 'path', { path: 'a.x.y' })).ids).toEqual([0]);
  expect((await ask(page(), 'path', { path: 'z' })).ids).toEqual([]);
});

const VIEW = { row: 1, which: 'mine', axes: [0, 1], fixed: [0, 0], y0: 0, x0: 0, y1: 0, x1: 0 };

test('a slice of a stored tensor is reduced to the values of largest magnitude', async () => {
  const { h, w, lo, hi, buffers } = await ask(page(), 'view', { ...VIEW, size: 2 });
  expect([h, w, lo, hi]).toEqual([2, 2, -9, 6]);
  expect([...new Float32Array(buffers[0]!.buffer)]).toEqual([2, 3, -9, 6]);
});

test('the axes of a slice may be swapped', async () => {
  const { rows, cols, buffers } = await ask(page(), 'view', { ...VIEW, axes: [1, 0], size: 9 });
  expect([rows, cols]).toEqual([3, 2]);
  expect([...new Float32Array(buffers[0]!.buffer)]).toEqual([1, 4, 2, -9, 3, 6]);
});

test('what the page does not hold is an error, except a missing curve', async () => {
  expect((await ask(page(), 'detail', { row: 9 })).error).toContain('not in this saved page');
  expect((await ask(page(), 'view', { ...VIEW, row: 2, size: 2 })).error).toBeDefined();
  expect((await ask(page(), 'series', { row: 9, n: 5 })).lines).toEqual([]);
});
