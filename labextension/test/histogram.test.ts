// @vitest-environment happy-dom
import { expect, test } from 'vitest';
import { Histogram } from '../src/widget/histogram';
import type { Histogram as Answer } from '../src/widget/wire';
import { Kernel, settled, texts } from './fakes';

const answers: Record<number, Answer | undefined> = {
  1: { lo: -1, hi: 1, counts: [90, 0, 9], nan: 2, inf: 1, total: 102 },
  2: { lo: 5, hi: 9, counts: [1, 1], nan: 0, inf: 0, total: 2 },
  3: { lo: null, hi: null, counts: [], nan: 4, inf: 0, total: 4 },
};

function histogram() {
  const kernel = new Kernel({ histogram: ({ row }) => answers[row] });
  const made = new Histogram(kernel.ask);
  const caption = () => texts(made.root, '.llmdebug-caption span');
  const heights = () =>
    [...made.root.querySelectorAll('rect')].map(bar => Number(bar.getAttribute('height')));
  return { made, kernel, caption, heights };
}

test('range, finite values, and those that are not are told', async () => {
  const { made, kernel, caption } = histogram();
  await made.show(1, 'mine');
  expect(kernel.of('histogram')).toEqual([{ row: 1, which: 'mine', bins: 64 }]);
  expect(caption()).toEqual(['-1', '99 finite · NaN 2 · inf 1', '1']);
  expect(made.root.querySelector('svg')!.getAttribute('aria-label')).toBe(
    'Histogram: 3 bins from -1 to 1',
  );
  expect(texts(made.root, 'title')[2]).toBe('0.3333 … 1: 9');
});

test('a log scale raises small counts', async () => {
  const { made, heights } = histogram();
  await made.show(1, 'mine');
  const [, , before] = heights();
  const log = made.root.querySelector('input')!;
  log.checked = true;
  log.dispatchEvent(new Event('change'));
  const [highest, none, after] = heights();
  expect(after! / highest!).toBeCloseTo(Math.log(10) / Math.log(91), 5);
  expect([before! < after!, none]).toEqual([true, 0]);
});

test('a tensor without finite values says how many are not', async () => {
  const { made, caption } = histogram();
  await made.show(3, 'golden');
  expect(caption()).toEqual(['–', '0 finite · NaN 4', '–']);
});

test('after an error nothing of the tensor before is left', async () => {
  const { made } = histogram();
  await made.show(1, 'mine');
  await made.show(9, 'mine');
  expect(made.root.querySelector('rect')).toBeNull();
  expect(made.root.querySelector<HTMLElement>('.llmdebug-caption')!.hidden).toBe(true);
});

test('the reply to an earlier choice does not overwrite the later one', async () => {
  const { made, kernel, caption } = histogram();
  kernel.held = true;
  void made.show(1, 'mine');
  void made.show(2, 'mine');
  await kernel.reply(1, 0);
  await settled();
  expect(caption()).toEqual(['5', '2 finite', '9']);
});
