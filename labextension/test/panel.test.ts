// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { Panel } from '../src/widget/panel';
import * as T from '../src/widget/strings';
import type { Detail, KernelView, Overview } from '../src/widget/wire';
import { detail, drawing, Kernel, named, overview, row, settled, side, texts } from './fakes';

beforeEach(() => void drawing());
afterEach(() => void vi.restoreAllMocks());

const bad = row(1, { verdict: 'diverged', error: 0.5, limit: 0.1, reason: 'twice the value' });
const pair = [
  side('golden', { nan: 0, mean: 1, call_id: '3_1', code: 'golden.tensor("a")' }),
  side('mine', { nan: 2, mean: 2, part: 'rows 0 to 9' }),
];
const metrics = [
  { name: 'relative_euclidean_distance', value: 0.25 },
  { name: 'odd_metric', value: 'nan' },
];

function panel(details: Record<number, Detail> = {}, report = true, shown: Partial<Overview> = {}) {
  const all: Record<number, Detail> = {
    ...{ 1: detail(bad, pair, { metrics }), 2: detail(row(2), [side('golden')]) },
    ...details,
  };
  const kernel = new Kernel({
    detail: ({ row: id }) => all[id],
    expect: () => overview({ title: 'after' }),
    unexpect: () => overview({ title: 'after' }),
  });
  const events = {
    overview: () => overview(shown),
    ...{ jump: vi.fn(), tree: vi.fn(), say: vi.fn(), shown: vi.fn(), updated: vi.fn() },
  };
  const made = new Panel(kernel.ask, report, index => `token ${index}`, events);
  document.body.replaceChildren(made.root);
  const show = async (id: number) => {
    await made.show(id);
    await settled();
  };
  const content = () => made.root.querySelector<HTMLElement>('.llmdebug-detail')!;
  const place = () => made.root.querySelector('.llmdebug-place')!;
  return { made, kernel, events, show, content, place, all };
}

test('before a record is chosen, and after an error, it says what to do', async () => {
  const { made, show, content } = panel();
  const hint = () => made.root.querySelector<HTMLElement>('.llmdebug-hint')!.hidden;
  await show(-1);
  expect([hint(), content().hidden, made.root.textContent]).toEqual([
    false,
    true,
    expect.stringContaining(T.chooseRow),
  ]);
  await show(1);
  expect([hint(), content().hidden]).toEqual([true, false]);
  await show(9);
  expect([hint(), content().hidden]).toEqual([false, true]);
});

test('a record says where it is, what it holds, and how it differs', async () => {
  const { show, place, events } = panel();
  await show(1);
  expect(texts(place(), ':scope > *')).toEqual([
    'layers.1 output[0]',
    'Linear · float32 [2, 3] · #1 · token 0 · id 3_1',
    'mine: only rows 0 to 9 was kept; the statistics describe the whole tensor',
    '✗ diverged error 0.5, limit 0.1twice the value',
  ]);
  expect(events.shown).toHaveBeenCalledWith(bad);
});

test('its name leads to the tree, its producer and neighbours to their records', async () => {
  const flow = [{ relation: 'inputs' as const, links: [{ row: 5, label: 'x <b>' }], total: 4 }];
  const made = detail(bad, pair, { producer: 3, producer_label: 'layers.0', flow });
  const { made: it, show, events } = panel({ 1: made });
  await show(1);
  named(it.root, 'layers.1').click();
  named(it.root, 'layers.0').click();
  named(it.root, 'x <b>').click();
  expect(events.tree.mock.calls).toEqual([['layers.1']]);
  expect(events.jump.mock.calls).toEqual([[3], [5]]);
  expect(texts(it.root, '.llmdebug-flow li')).toEqual(['x <b>', 'and 3 more']);
  expect(it.root.querySelector('.llmdebug-flow ul')!.getAttribute('aria-label')).toBe(
    'computed from',
  );
});

test('names from the model and the program are text', async () => {
  const html = '<img src=x>';
  const named = row(1, { path: html, op: html, reason: html, verdict: 'expected', expected: html });
  const kernel: KernelView = { name: html, nodes: [html], code: html };
  const { made, show } = panel({ 1: detail(named, [side('golden', { code: html, kernel })]) });
  await show(1);
  expect([made.root.querySelector('img'), made.root.textContent.split(html).length > 6]).toEqual([
    null,
    true,
  ]);
});

test('statistics stand side by side, and exact ones that differ are marked', async () => {
  const { made, show } = panel();
  await show(1);
  expect(texts(made.root, '.llmdebug-summary th[scope=col]')).toEqual(['golden', 'mine']);
  const differing = [...made.root.querySelectorAll('.llmdebug-differs')];
  expect(differing.map(line => texts(line, 'th, td'))).toEqual([['nan', '0', '2']]);
});

test('the metrics that say most stand first, all of them in a table', async () => {
  const { made, show } = panel();
  await show(1);
  expect(texts(made.root, '.llmdebug-first span')).toEqual(['relative L2 0.25']);
  expect(made.root.querySelector<HTMLElement>('.llmdebug-first span')!.title).toBe(T.aboutL2);
  expect(texts(made.root, '.llmdebug-metrics th, .llmdebug-metrics td')).toEqual([
    'relative_euclidean_distance',
    '0.25',
    'odd_metric',
    'nan',
  ]);
});

test('the code of a tensor can be copied; its kernel is open where it diverged', async () => {
  const kernel: KernelView = { name: 'triton_1', nodes: ['mul', 'add'], code: 'tl.load()' };
  const none = { ...kernel, code: '' };
  const { made, show } = panel({
    1: detail(bad, [side('golden', { kernel, code: 'a' }), side('mine', { kernel: none })]),
  });
  await show(1);
  const kernels = [...made.root.querySelectorAll<HTMLDetailsElement>('.llmdebug-kernel')];
  expect(kernels.map(one => one.open)).toEqual([true, true]);
  expect(kernels[0]!.textContent).toContain('golden: kernel triton_1computes 2 nodes: mul, add');
  expect(kernels[1]!.textContent).toContain(T.noKernelCode);
  expect(named(made.root, T.copy)).toBeDefined();
});

test('a mismatch is marked as expected; its form opens by the key', async () => {
  const { made, kernel, events, show } = panel();
  await show(1);
  made.expect();
  expect(document.activeElement!.getAttribute('aria-label')).toBe(T.comment);
  expect(made.root.querySelector<HTMLDetailsElement>('.llmdebug-more')!.open).toBe(true);
  made.root.querySelector('form')!.dispatchEvent(new Event('submit'));
  await settled();
  expect(kernel.of('expect')[0]).toMatchObject({ row: 1, finding: -1 });
  expect(events.updated.mock.calls[0]![1]).toBe(T.markedNow);
});

test('a marked record has a button that removes the mark, which the key focuses', async () => {
  const known = detail(row(1, { verdict: 'expected', expected: 'known', mark: 0 }), pair);
  const marks = [{ text: 'layers.1', comment: 'known', rows: 2 }];
  const { made, kernel, show } = panel({ 1: known }, true, { marks });
  await show(1);
  made.expect();
  expect(document.activeElement!.textContent).toBe(T.unmarkFace);
  (document.activeElement as HTMLElement).click();
  expect(kernel.of('unexpect')).toEqual([{ mark: 0, text: 'layers.1' }]);
});

test('a record that agrees cannot be marked, and that is said', async () => {
  const { made, events, show } = panel();
  await show(2);
  made.expect();
  expect(events.say.mock.calls).toEqual([[T.nothingToMark]]);
});

test('the panel of a comparison can be focused, and has a name', () => {
  const { made } = panel();
  made.focus();
  expect([document.activeElement, made.root.getAttribute('aria-label')]).toEqual([
    made.root,
    'Tensor',
  ]);
});

test('in a run nothing is folded', async () => {
  const { made, show, place } = panel({}, false);
  await show(2);
  expect(made.root.querySelector('.llmdebug-more')).toBeNull();
  expect(place().textContent).toContain('layers.2');
  expect(made.root.querySelector('.llmdebug-summary')).not.toBeNull();
});

test('the reply to an earlier record does not overwrite the later one', async () => {
  const { made, kernel, place, events } = panel();
  kernel.held = true;
  void made.show(1);
  void made.show(2);
  await kernel.reply(1, 0);
  expect(place().textContent).toContain('layers.2');
  expect(events.shown).toHaveBeenCalledOnce();
});

test('the verdict before a mark does not overwrite the one after it', async () => {
  const { made, kernel, place, all } = panel();
  kernel.held = true;
  void made.show(1);
  all[1] = detail(row(1, { verdict: 'expected', expected: 'known' }), pair);
  void made.show(1);
  await kernel.reply(1, 0);
  expect(place().textContent).not.toContain('diverged');
});
