// @vitest-environment happy-dom
import { expect, test } from 'vitest';
import { Errors } from '../src/widget/errors';
import type { ErrorHistogram } from '../src/widget/wire';
import { Kernel, texts } from './fakes';

const some: ErrorHistogram = {
  ...{ lo: -4, hi: 0, counts: [3, 0, 0, 7], same: 88, broken: 2, total: 100, limit: 0.01 },
};

function errors(more: Record<number, Partial<ErrorHistogram>> = {}) {
  const kernel = new Kernel({
    errors: ({ row }) => (row === 9 ? undefined : { ...some, ...more[row] }),
  });
  const made = new Errors(kernel.ask);
  const note = () => made.root.querySelector('.llmdebug-marks')!.textContent;
  const caption = () => texts(made.root, '.llmdebug-error-histogram .llmdebug-caption span');
  return { made, kernel, note, caption };
}

test('how many elements differ, how many are not finite, and the limit are told', async () => {
  const { made, note, caption } = errors();
  await made.show(1);
  expect(note()).toBe(
    '10 of 100 elements differ · 2 with NaN or inf · ' +
      'dashed: the limit, spread evenly over the elements (0.01)',
  );
  expect(caption()).toEqual(['1e-4', '|mine − golden|, log scale', '1']);
  expect(made.root.querySelector('svg')!.getAttribute('aria-label')).toContain(note());
});

test('the limit is drawn at its place on the scale', async () => {
  const { made } = errors();
  await made.show(1);
  expect(made.root.querySelector('line')!.getAttribute('x1')).toBe('2'); // 1e-2 of 1e-4 … 1e0
});

test('a limit beyond the bars widens the picture, at most to three times its width', async () => {
  const { made, caption } = errors({ 1: { limit: 1000 }, 2: { limit: 1e30 } });
  await made.show(1);
  expect(made.root.querySelector('svg')!.getAttribute('viewBox')).toBe('0 0 8 64');
  expect(caption()[2]).toBe('10000');
  await made.show(2);
  expect(made.root.querySelector('line')!.getAttribute('x1')).toBe('12');
});

test('without a limit there is no line, and no word of one', async () => {
  const { made, note } = errors({ 1: { limit: null } });
  await made.show(1);
  expect(made.root.querySelector('line')).toBeNull();
  expect(note()).not.toContain('limit');
});

test('equal tensors have no bars, and say that nothing differs', async () => {
  const { made, note } = errors({ 1: { counts: [], same: 100, broken: 0, limit: null } });
  await made.show(1);
  expect([note(), made.root.querySelector('svg')]).toEqual(['0 of 100 elements differ', null]);
});

test('without a difference, or after an error, nothing is shown', async () => {
  const { made, kernel } = errors();
  await made.show(-1);
  expect([made.root.hidden, kernel.of('errors').length]).toEqual([true, 0]);
  await made.show(1);
  expect(made.root.hidden).toBe(false);
  await made.show(9);
  expect(made.root.hidden).toBe(true);
});

test('the reply to an earlier tensor does not overwrite the later one', async () => {
  const { made, kernel, note } = errors({ 2: { same: 0, broken: 0, limit: null } });
  kernel.held = true;
  void made.show(1);
  void made.show(2);
  await kernel.reply();
  expect(note()).toBe('100 of 100 elements differ');
});
