// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { Sparklines } from '../src/widget/sparklines';
import type { Line, Num } from '../src/widget/wire';
import { Kernel, press, sized, texts } from './fakes';

const line = (figure: string, ...values: Num[]): Line => ({
  figure,
  points: values.map((value, i) => ({ step: 2 * i, row: 10 + i, value })),
});
const answers: Record<number, Line[] | undefined> = {
  1: [line('<b>error</b>', 1, 2, 3), line('max', 0.001, null, 10)],
  2: [line('max', 5, 'nan', 'inf')],
  3: [line('max', 5)],
};

beforeEach(() => sized(400, 36));
afterEach(() => void vi.restoreAllMocks());

function sparklines() {
  const kernel = new Kernel({
    series: ({ row }) => {
      const lines = answers[row];
      return lines && { lines };
    },
  });
  const jump = vi.fn();
  const made = new Sparklines(kernel.ask, { jump, step: index => `step ${index}` });
  document.body.replaceChildren(made.root);
  const sliders = () => [...made.root.querySelectorAll('[role=slider]')];
  const value = (at = 0) => sliders()[at]?.getAttribute('aria-valuetext');
  const paths = () => [...made.root.querySelectorAll('path')].map(one => one.getAttribute('d')!);
  return { made, kernel, jump, sliders, value, paths };
}

test('each figure has a curve with its range, and says its value at the step', async () => {
  const { made, sliders, value } = sparklines();
  await made.show(1, 2);
  expect(texts(made.root, 'figcaption')).toEqual([
    '<b>error</b> over all steps1 … 3',
    'max over all steps0.001 … 10',
  ]);
  expect(made.root.querySelector('b')).toBeNull();
  expect([value(0), value(1)]).toEqual(['step 2: 2', 'step 2: –']);
  expect(sliders()[0]!.getAttribute('aria-valuemax')).toBe('2');
});

test('between two points it stands at the one before', async () => {
  const { made, value } = sparklines();
  await made.show(1, 3);
  expect(value()).toBe('step 2: 2');
  await made.show(1, 0);
  expect(value()).toBe('step 0: 1');
});

test('arrow keys, Home and End select the tensor at other steps', async () => {
  const { made, jump, sliders, value } = sparklines();
  await made.show(1, 0);
  press(sliders()[0]!, 'ArrowRight');
  press(sliders()[0]!, 'End');
  press(sliders()[0]!, 'ArrowUp'); // there is no further one
  press(sliders()[0]!, 'ArrowDown');
  press(sliders()[0]!, 'Home');
  expect(jump.mock.calls.flat()).toEqual([11, 12, 11, 10]);
  expect(value()).toBe('step 0: 1');
  expect(press(sliders()[0]!, 'ArrowRight', { ctrlKey: true }).defaultPrevented).toBe(false);
});

test('a click selects the step under it', async () => {
  const { made, jump, sliders } = sparklines();
  await made.show(1, 0);
  sliders()[0]!.dispatchEvent(new MouseEvent('click', { clientX: 390 }));
  sliders()[0]!.dispatchEvent(new MouseEvent('click', { clientX: 390 }));
  expect(jump.mock.calls).toEqual([[12]]);
});

test('a missing figure is a gap, one that is not finite a line from top to bottom', async () => {
  const { made, paths } = sparklines();
  await made.show(1, 0);
  expect(paths()[3]!.match(/M/g)!.length).toBe(2);
  expect(paths()[4]).toBe('');
  await made.show(2, 0);
  expect(paths()[1]!.match(/V36/g)!.length).toBe(2);
});

test('a wide range is drawn on a logarithmic scale', async () => {
  answers[4] = [line('max', 1, 10, 1e4)];
  const { made, paths } = sparklines();
  await made.show(4, 0);
  const heights = [...paths()[0]!.matchAll(/ ([\d.]+)h/g)].map(found => Number(found[1]));
  expect(heights).toEqual([32, 25, 4]); // 28 pixels for four powers of ten
});

test('a single step has no curve, neither has an error', async () => {
  const { made } = sparklines();
  await made.show(3, 0);
  expect(made.root.hidden).toBe(true);
  await made.show(1, 0);
  expect(made.root.hidden).toBe(false);
  await made.show(9, 0);
  expect(made.root.hidden).toBe(true);
});

test('a curve keeps its element, and so the focus, from tensor to tensor', async () => {
  const { made, sliders } = sparklines();
  await made.show(1, 0);
  const [first] = sliders();
  await made.show(2, 0);
  expect(sliders()).toEqual([first]);
});

test('the reply to an earlier tensor does not overwrite the later one', async () => {
  const { made, kernel, value } = sparklines();
  kernel.held = true;
  void made.show(1, 0);
  void made.show(2, 0);
  await kernel.reply();
  expect(value()).toBe('step 0: 5');
});
