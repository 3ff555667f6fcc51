// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { DIVERGED, MADE, type LayerErrors } from '../src/widget/layererrors';
import { Strip } from '../src/widget/strip';
import type { CallCell } from '../src/widget/wire';
import { Kernel, press, row, sized, texts } from './fakes';

beforeEach(() => sized(1000, 50));
afterEach(() => void vi.restoreAllMocks());

const cell = (id: number, more: Partial<CallCell> = {}): CallCell => ({
  ...{ label: `c${id}`, path: `layers.1.c${id}`, row: id, state: 3, error: null, limit: null },
  differing: '',
  ...more,
});
const ERRORS = {
  serial: 1,
  shortName: (layer: number) => `layer ${layer}`,
  name: (layer: number) => `model.layers.${layer}`,
} as LayerErrors;

function strip(layers: Record<number, CallCell[] | undefined> = {}, total = 0) {
  const calls: Record<number, CallCell[] | undefined> = {
    0: [cell(1), cell(2, { state: DIVERGED }), cell(3, { state: MADE, error: 0.5, limit: 0.1 })],
    1: [cell(11), cell(12)],
    ...layers,
  };
  const kernel = new Kernel({
    calls: ({ layer }) => {
      const cells = calls[layer];
      return cells && { cells, total: total || cells.length };
    },
  });
  const events = { choose: vi.fn(), tell: vi.fn() };
  const made = new Strip(kernel.ask, events);
  document.body.replaceChildren(made.root);
  const show = (layer: number) => made.show({ layer, step: 0 }, ERRORS);
  const at = () => made.root.querySelector('[aria-current]')?.textContent;
  const buttons = () => [...made.root.querySelectorAll('button')];
  return { made, kernel, events, show, at, buttons };
}

test('the calls of a layer stand in execution order, marked where the error is made', async () => {
  const { made, show, at, buttons } = strip();
  await show(0);
  expect(texts(made.root, 'button')).toEqual(['c1', 'c2 ⤵', 'c3 ✗']);
  expect([at(), made.root.querySelector('.llmdebug-strip-name')!.textContent]).toEqual([
    'c3 ✗',
    'layer 0',
  ]);
  expect(buttons()[2]!.getAttribute('aria-label')).toBe(
    'layers.1.c3: diverged, made here, error 0.5, limit 0.1',
  );
});

test('names are text', async () => {
  const { made, show } = strip({ 0: [cell(1, { label: '<b>x</b>', path: '<i>' })] });
  await show(0);
  expect([made.root.querySelector('button b, i'), texts(made.root, 'button')]).toEqual([
    null,
    ['<b>x</b>'],
  ]);
});

test('a layer of more calls than are listed says so; one without is not shown', async () => {
  const { made, show } = strip({ 1: [] }, 4000);
  await show(0);
  expect(made.root.textContent).toContain('layer 0 (first 3 of 4,000)');
  await show(1);
  expect(made.root.hidden).toBe(true);
});

test('a click selects the row of a call, the pointer tells what it is', async () => {
  const { events, show, at, buttons } = strip();
  await show(0);
  buttons()[0]!.dispatchEvent(new Event('pointerenter'));
  expect(events.tell).toHaveBeenCalledWith('layers.1.c1: match');
  buttons()[0]!.click();
  expect([events.choose.mock.calls, at()]).toEqual([[[1]], 'c1']);
});

test('arrow keys go from call to call and stop at the ends; Home and End are these', async () => {
  const { made, show, at } = strip();
  await show(0);
  press(made.root, 'ArrowLeft');
  expect([at(), document.activeElement?.textContent]).toEqual(['c2 ⤵', 'c2 ⤵']);
  press(made.root, 'End');
  expect(press(made.root, 'ArrowRight').defaultPrevented).toBe(true);
  expect(at()).toBe('c3 ✗');
  press(made.root, 'Home');
  expect(at()).toBe('c1');
  expect(press(made.root, 'ArrowRight', { ctrlKey: true }).defaultPrevented).toBe(false);
});

test('one call is in the order of tabs', async () => {
  const { show, buttons } = strip();
  await show(1); // none of them is marked
  expect(buttons().map(one => one.tabIndex)).toEqual([0, -1]);
});

test('the call of the selected row is marked, by its path at another token', async () => {
  const { made, show, at } = strip();
  await show(0);
  made.point(row(1, { path: 'layers.1.c1' }));
  expect(at()).toBe('c1');
  made.point(row(99, { path: 'layers.1.c2' }));
  expect(at()).toBe('c2 ⤵');
  made.point(row(98, { path: 'elsewhere' }));
  expect(at()).toBeUndefined();
});

test('a row that is selected while its calls are on their way is marked as they come', async () => {
  const { made, kernel, show, at } = strip();
  kernel.held = true;
  void show(0);
  made.point(row(1, { path: 'layers.1.c1' }));
  await kernel.reply();
  expect(at()).toBe('c1');
});

test('the reply to an earlier layer does not overwrite the later one', async () => {
  const { made, kernel, show } = strip();
  kernel.held = true;
  void show(0);
  void show(1);
  await kernel.reply(1, 0);
  expect(texts(made.root, 'button')).toEqual(['c11', 'c12']);
});

test('the same place is asked for once, after an error again', async () => {
  const calls: Record<number, CallCell[] | undefined> = { 0: undefined };
  const { kernel, show } = strip(calls);
  await show(1);
  await show(1);
  expect(kernel.of('calls').length).toBe(1);
  await show(0);
  await show(0);
  expect(kernel.of('calls').length).toBe(3);
});
