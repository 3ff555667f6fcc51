// @vitest-environment happy-dom
import { expect, test, vi } from 'vitest';
import type { Worst as Answer } from '../src/widget/wire';
import { Worst } from '../src/widget/worst';
import { Kernel, named, texts } from './fakes';

const answers: Record<number, Answer | undefined> = {
  1: {
    elements: [
      { index: [0, 2], golden: 1, mine: 'nan', difference: 'nan' },
      { index: [1, 0], golden: 0.123456789, mine: 0.5, difference: 0.376543211 },
    ],
    differing: 1200,
  },
  2: { elements: [{ index: [7], golden: 1, mine: 2, difference: 1 }], differing: 1 },
  3: { elements: [], differing: 0 },
};

function worst() {
  const kernel = new Kernel({ worst: ({ row }) => answers[row] });
  const choose = vi.fn();
  return { made: new Worst(kernel.ask, choose), kernel, choose };
}

test('the elements are listed with both values; how many differ in all is told', async () => {
  const { made } = worst();
  expect(await made.show(1)).toEqual([0, 2]);
  expect(made.root.querySelector('caption')!.textContent).toBe(
    'Worst elements: 2 of 1,200 that differ',
  );
  expect(texts(made.root, 'th[scope=col]')).toEqual(['index', 'golden', 'mine', 'difference']);
  expect(texts(made.root, 'td')).toEqual(['1', 'nan', 'nan', '0.12346', '0.5', '0.37654']);
  expect(made.root.querySelectorAll('td')[3]!.title).toBe('0.123456789');
});

test('an element is chosen by its index', async () => {
  const { made, choose } = worst();
  await made.show(1);
  named(made.root, '[1, 0]').click();
  expect(choose.mock.calls).toEqual([[[1, 0]]]);
});

test('without a difference, or after an error, there is no table', async () => {
  const { made, kernel } = worst();
  await made.show(1);
  expect(await made.show(-1)).toBeUndefined();
  expect([made.root.hidden, kernel.of('worst').length]).toEqual([true, 1]);
  expect(await made.show(9)).toBeUndefined();
  expect(made.root.hidden).toBe(true);
});

test('tensors that do not differ have no worst element', async () => {
  const { made } = worst();
  expect(await made.show(3)).toBeUndefined();
  expect(made.root.textContent).toContain('0 of 0 that differ');
});

test('the reply to an earlier tensor does not overwrite the later one', async () => {
  const { made, kernel } = worst();
  kernel.held = true;
  const [first, second] = [made.show(1), made.show(2)];
  await kernel.reply(1, 0);
  expect([await first, await second]).toEqual([undefined, [7]]);
  expect(texts(made.root, 'tbody th button, tr th button')).toEqual(['[7]']);
});

test('an element of the tensor before leads nowhere while the next one is on its way', async () => {
  const { made, kernel, choose } = worst();
  await made.show(1);
  kernel.held = true;
  void made.show(2);
  named(made.root, '[1, 0]').click();
  expect(choose).not.toHaveBeenCalled();
});
