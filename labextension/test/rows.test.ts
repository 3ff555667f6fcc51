// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { Rows } from '../src/widget/rows';
import * as T from '../src/widget/strings';
import type { Row, RowsRequest, TreeNode } from '../src/widget/wire';
import { Kernel, named, press, row, settled, sized, texts } from './fakes';

beforeEach(() => sized(900, 240));
afterEach(() => {
  vi.useRealTimers();
  vi.restoreAllMocks();
});

const NODE = { id: 4, path: 'model.layers' } as TreeNode;
const tokens = { which: '12-39', differing: 'tokens 12-39 of 40' };
const bad = { verdict: 'diverged', error: 0.5, limit: 0.1, ...tokens } as const;

function rows(report = true, all: Row[] = [row(0), row(1, bad), row(2)], ranks: number[] = []) {
  const problems: Record<string, string> = { '>x': 'x is no number' };
  const failing = new Set<string>();
  const kernel = new Kernel({
    rows: ({ start, n, text, step }: Omit<RowsRequest, 'op'>) => {
      if (failing.has(text)) return undefined;
      const problem = problems[text] ?? '';
      const found = problem ? [] : all.filter(one => one.path.includes(text) && one.step === step);
      return { total: found.length, start, rows: found.slice(start, start + n), problem };
    },
    row: ({ row: id }) => ({ row: all[id]!, index: id }),
  });
  const events = { choose: vi.fn(), clearNode: vi.fn(), narrowed: vi.fn() };
  const made = new Rows(kernel.ask, report, ranks, index => `token ${index}`, events);
  document.body.replaceChildren(made.root);
  const grid = made.root.querySelector<HTMLElement>('[role=grid]')!;
  const show = async (step = 0, node: TreeNode | null = null) => {
    made.show(step, node);
    await settled();
  };
  const total = () => made.root.querySelector('.llmdebug-total')!.textContent;
  const chosen = () => events.choose.mock.calls.map(([one]) => (one as Row).id);
  const type = async (text: string) => {
    const input = made.root.querySelector<HTMLInputElement>('.llmdebug-filter')!;
    input.value = text;
    input.dispatchEvent(new Event('input'));
    await vi.waitFor(() => expect(kernel.of('rows').at(-1)!.text).toBe(text));
    await settled();
  };
  const tick = async (name: string) => {
    const box = made.root.querySelector<HTMLInputElement>(`.llmdebug-${name}`)!;
    box.checked = !box.checked;
    box.dispatchEvent(new Event('change'));
    await settled();
  };
  return { made, kernel, events, grid, show, total, chosen, type, tick, failing };
}
const many = Array.from({ length: 1000 }, (_, id) => row(id));

test('each record of the step has a line with its figures; the list says how many', async () => {
  const { made, grid, show, total } = rows();
  await show();
  expect(total()).toBe('3 records');
  expect([grid.getAttribute('aria-rowcount'), grid.getAttribute('aria-label')]).toEqual([
    '4',
    'Records',
  ]);
  const line = made.root.querySelector('[data-row="1"]')!;
  expect(texts(line, '[role=gridcell]')).toEqual([
    '1',
    'layers.1 out[0]',
    'Linear',
    'f32',
    '2×3',
    '0.5',
    '0.1',
    '12-39',
    '✗ diverged',
  ]);
  const which = line.querySelector(`[title="${tokens.differing}"]`);
  expect(which?.textContent).toBe(tokens.which);
  expect(line.getAttribute('aria-rowindex')).toBe('3');
  expect(line.classList.contains('llmdebug-is-bad')).toBe(true);
});

test('a run shows statistics in place of verdicts, and cannot be sorted', async () => {
  const { made, show } = rows(false);
  await show();
  expect(texts(made.root, '[role=columnheader]').slice(-4)).toEqual([
    'min',
    'max',
    'mean',
    'l2 norm',
  ]);
  expect(made.root.querySelector('.llmdebug-sort, [type=checkbox]')).toBeNull();
});

test('names from the model are text', async () => {
  const name = '<img src=x>';
  const { made, show } = rows(true, [row(0, { path: name, op: name, expected: name, nan: 3 })]);
  await show(0, { id: 1, path: '<b>in</b>' } as TreeNode);
  expect(made.root.querySelector('img, .llmdebug-chip b')).toBeNull();
  expect(made.root.textContent).toContain(name);
  expect(texts(made.root, '.llmdebug-badge')).toEqual(['NaN 3']);
});

test('a click and the arrow keys select records, and say which is active', async () => {
  const { grid, show, chosen, made } = rows();
  await show();
  grid.dispatchEvent(new MouseEvent('click', { clientY: 30 }));
  await settled();
  press(grid, 'ArrowDown');
  await settled();
  press(grid, 'Home');
  await settled();
  press(grid, 'End');
  await settled();
  press(grid, 'ArrowDown');
  await settled();
  expect(chosen()).toEqual([1, 2, 0, 2, 2]);
  const selected = made.root.querySelector('[aria-selected=true]')!;
  expect([selected.id, texts(selected, '.llmdebug-path')]).toEqual([
    grid.getAttribute('aria-activedescendant'),
    ['layers.2'],
  ]);
  expect(press(grid, 'ArrowDown', { altKey: true }).defaultPrevented).toBe(false);
});

test('the record of the last key is selected, also if its page was there before', async () => {
  const { grid, kernel, show, chosen } = rows(true, many);
  await show();
  kernel.held = true;
  press(grid, 'End'); // its page has to be fetched
  press(grid, 'Home');
  await settled();
  await kernel.reply();
  expect(chosen()).toEqual([0]);
});

test('the list is filtered after a pause in typing, and says so', async () => {
  const { made, events, show, total, type } = rows();
  await show();
  expect(made.isFiltered).toBe(false);
  await type('layers.2');
  expect([total(), events.narrowed.mock.calls.length, made.isFiltered]).toEqual([
    '1 record',
    1,
    true,
  ]);
  await type('');
  expect(total()).toBe('3 records');
});

test('a filter that cannot be read says why; one that none passes says that', async () => {
  const { made, grid, show, type } = rows();
  const invalid = () => made.root.querySelector('.llmdebug-filter')!.getAttribute('aria-invalid');
  await show();
  await type('>x');
  expect([invalid(), grid.dataset.none]).toEqual(['true', 'x is no number']);
  expect(grid.classList.contains('llmdebug-none')).toBe(true);
  await type('nothing');
  expect([invalid(), grid.dataset.none]).toEqual(['false', T.noRecords]);
});

test('after an error it does not say that no record passes', async () => {
  const { grid, show, type, failing } = rows();
  failing.add('broken');
  await show();
  await type('broken');
  expect(grid.dataset.none).toBe(T.unreadable);
});

test('the reply to an earlier filter says nothing about the later one', async () => {
  const { made, grid, kernel, show } = rows();
  await show();
  kernel.held = true;
  made.begin({ mismatch: false, text: '>x' });
  made.refresh();
  made.begin({ mismatch: false, text: '' });
  made.refresh();
  await kernel.reply(1, 0);
  expect(grid.dataset.none).toBe(T.noRecords);
  expect(grid.classList.contains('llmdebug-none')).toBe(false);
});

test('a rank can be chosen where there are several; it is a part of the filter', async () => {
  const { made, kernel, show, type } = rows(true, undefined, [0, 1]);
  await show();
  const choice = made.root.querySelector<HTMLSelectElement>('.llmdebug-rank')!;
  expect([...choice.options].map(option => option.text)).toEqual(['all ranks', 'rank 0', 'rank 1']);
  const choose = async (value: string) => {
    choice.value = value;
    choice.dispatchEvent(new Event('change'));
    await settled();
    return kernel.of('rows').at(-1)!.text;
  };
  await type('down nan');
  expect(await choose('1')).toBe('down nan rank:1');
  expect(await choose('0')).toBe('down nan rank:0');
  expect(await choose('')).toBe('down nan');
  for (const [text, chosen] of [
    ['rank:1 up', '1'],
    ['rank:0 rank:1', ''],
    ['frank:1', ''],
  ] as const) {
    await type(text);
    expect(choice.value).toBe(chosen);
  }
  expect(rows().made.root.querySelector('.llmdebug-rank')).toBeNull();
});

test('a heading sorts, reverses and restores, and says how', async () => {
  const { made, kernel, show } = rows();
  await show();
  const sort = async () => {
    made.root.querySelector<HTMLElement>('[data-sort=error]')!.click();
    await settled();
    const head = made.root.querySelector('[data-sort=error]')!;
    const { sort: by, descending } = kernel.of('rows').at(-1)!;
    return [head.parentElement!.getAttribute('aria-sort'), by, descending];
  };
  expect(await sort()).toEqual(['descending', 'error', true]);
  expect(document.activeElement!.getAttribute('data-sort')).toBe('error');
  expect(await sort()).toEqual(['ascending', 'error', false]);
  expect(await sort()).toEqual(['none', '', false]);
});

test('mismatches alone, and all tokens, can be asked for', async () => {
  const { made, kernel, show, tick } = rows();
  await show();
  await tick('mismatches');
  await tick('every');
  expect(kernel.of('rows').at(-1)).toMatchObject({ mismatch: true, every: true });
  expect(texts(made.root, '[role=columnheader]')[0]).toContain('token');
  expect([made.shows(7), made.filter.every]).toEqual([true, true]);
});

test('with all tokens listed, another token needs no new list', async () => {
  const { kernel, show, tick } = rows();
  await show();
  await tick('every');
  const asked = kernel.of('rows').length;
  await show(1);
  expect(kernel.of('rows').length).toBe(asked);
});

test('the module that the list is narrowed to has a chip that clears it', async () => {
  const { made, kernel, events, show } = rows();
  await show(0, NODE);
  expect(kernel.of('rows').at(-1)!.node).toBe(4);
  named(made.root, 'in model.layers ✕').click();
  expect([events.clearNode.mock.calls.length, made.isFiltered]).toEqual([1, true]);
  await show(0, null);
  expect(made.root.querySelector<HTMLElement>('.llmdebug-chip')!.hidden).toBe(true);
});

test('the list scrolls to the selected record, and fetches what comes into view', async () => {
  const { made, kernel, show, grid } = rows(true, many);
  await show();
  made.select(700, 700);
  expect(made.has(700)).toBe(true);
  await vi.waitFor(() => expect(kernel.of('rows').at(-1)!.start).toBe(600));
  await vi.waitFor(() =>
    expect(grid.querySelector('[aria-selected=true]')?.textContent).toContain('layers.700'),
  );
});

test('the list of an earlier token does not overwrite that of the later one', async () => {
  const { made, kernel, total } = rows(true, [row(0), row(1), row(2, { step: 1 })]);
  kernel.held = true;
  made.show(0, null);
  made.show(1, null);
  await kernel.reply(1, 0);
  expect(total()).toBe('1 record');
});

test('the place of a record is asked for with the filter', async () => {
  const { made, kernel } = rows();
  made.begin({ mismatch: true, text: 'mlp' });
  expect((await made.where(2))!.index).toBe(2);
  expect(kernel.of('row')[0]).toMatchObject({ row: 2, mismatch: true, text: 'mlp', node: -1 });
  made.clearFilter();
  expect(made.isFiltered).toBe(false);
});

test('after it is disposed of, typing asks for nothing', async () => {
  const { made, kernel, show } = rows();
  await show();
  vi.useFakeTimers();
  made.root.querySelector('.llmdebug-filter')!.dispatchEvent(new Event('input'));
  made.dispose();
  vi.runAllTimers();
  expect(kernel.of('rows').length).toBe(1);
});
