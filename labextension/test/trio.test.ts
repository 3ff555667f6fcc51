// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { Trio } from '../src/widget/trio';
import type { Which } from '../src/widget/wire';
import { drawing, Kernel, press, sent, settled, side, sized, texts } from './fakes';

const VALUES: Record<Which, number[]> = {
  golden: [0, 1, 2, 3],
  mine: [0, 1, 2, 4],
  difference: [0, 0, 0, 1],
};
const SIDES = [
  side('golden', { min: -2, max: 5 }),
  side('mine', { min: 0, max: 9 }),
  side('difference', { min: -3, max: 1 }),
];
const SLICE = { row: 1, axes: [0, 1], fixed: [0, 0] };

beforeEach(() => {
  drawing();
  sized(40, 40);
});
afterEach(() => void vi.restoreAllMocks());

async function trio(broken?: Which) {
  const kernel = new Kernel({
    view: ({ which, y0, x0, y1 }) => {
      if (which === broken) return undefined;
      const place = { h: 2, w: 2, fy: 1, fx: 1, y0: 0, x0: 0, y1: 2, x1: 2, rows: 2, cols: 2 };
      const one = VALUES[which][2 * y0 + x0]!;
      const values = y1 === y0 + 1 ? [one] : VALUES[which];
      return sent({ ...place, lo: 0, hi: 4 }, new Float32Array(values));
    },
  });
  const made = new Trio(kernel.ask);
  document.body.replaceChildren(made.root);
  made.show(SLICE, SIDES);
  await settled();
  const maps = [...made.root.querySelectorAll('canvas')];
  const line = () => made.root.querySelector('.llmdebug-linked')!.textContent;
  const point = (map: number, x: number, y: number) => {
    const event = new PointerEvent('pointermove');
    Object.defineProperties(event, { offsetX: { value: x }, offsetY: { value: y } });
    maps[map]!.dispatchEvent(event);
  };
  const values = () => texts(made.root, '.llmdebug-value');
  return { made, kernel, maps, line, point, values };
}

test('the three sides have their names above them', async () => {
  const { made, kernel } = await trio();
  expect(texts(made.root, '.llmdebug-side')).toEqual(['golden', 'mine', 'difference']);
  expect(kernel.of('view').map(one => one.which)).toEqual(['golden', 'mine', 'difference']);
});

test('golden and mine share a scale of all values; that of the difference is even', async () => {
  const { made } = await trio();
  const ends = [...made.root.querySelectorAll('.llmdebug-legend')].map(legend =>
    texts(legend, 'span:not([class])'),
  );
  expect(ends).toEqual([
    ['-9', '9'],
    ['-9', '9'],
    ['-3', '3'],
  ]);
});

test('the pointer tells the element under it in all three', async () => {
  const { line, point, maps } = await trio();
  point(1, 30, 30);
  expect(line()).toBe('[1, 1]: golden 3 · mine 4 · difference 1');
  maps[1]!.dispatchEvent(new Event('pointerleave'));
  expect(line()).toBe('Point at an element to see its value in all three.');
});

test('a side that cannot be read has no value; the others still tell theirs', async () => {
  const { line, point } = await trio('golden');
  point(1, 30, 30);
  expect(line()).toBe('[1, 1]: golden – · mine 4 · difference 1');
});

test('an element that is picked in one is shown in all', async () => {
  const { maps, values } = await trio();
  press(maps[0]!, 'Enter');
  await settled();
  expect(values()).toEqual(['[1, 1] = 3', '[1, 1] = 4', '[1, 1] = 1']);
});

test('an element can be shown from elsewhere', async () => {
  const { made, values } = await trio();
  made.mark({ y: 1, x: 0 });
  await settled();
  expect(values()).toEqual(['[1, 0] = 2', '[1, 0] = 2', '[1, 0] = 0']);
});

test('a name of a side is announced as it changes', async () => {
  const { made } = await trio();
  expect(made.root.querySelector('.llmdebug-linked')!.getAttribute('aria-live')).toBe('polite');
});
