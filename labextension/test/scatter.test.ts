// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { Scatter } from '../src/widget/scatter';
import type { Scatter as Answer } from '../src/widget/wire';
import { drawing, Kernel, pixels, sent, sized, texts, type Drawn } from './fakes';

const few: Answer = { lo: 0, hi: 4, size: 0, count: 2, broken: 0 };
const many: Answer = { lo: -1, hi: 1, size: 2, count: 5, broken: 3 };
let drawn: Drawn[];

beforeEach(() => {
  drawn = drawing();
  sized(100, 100);
});
afterEach(() => void vi.restoreAllMocks());

function scatter() {
  const kernel = new Kernel({
    scatter: ({ row }) =>
      row === 1
        ? sent(few, new Float32Array([0, 4]), new Float32Array([4, 0]))
        : row === 2
          ? sent(many, new Uint32Array([4, 0, 0, 1]))
          : undefined,
  });
  const made = new Scatter(kernel.ask);
  const canvas = made.root.querySelector('canvas')!;
  const told = () => made.root.querySelector('.llmdebug-scatter-told')!.textContent;
  const point = (x: number, y: number) => {
    const event = new PointerEvent('pointermove');
    Object.defineProperties(event, { offsetX: { value: x }, offsetY: { value: y } });
    canvas.dispatchEvent(event);
  };
  return { made, kernel, canvas, told, point };
}

test('few elements are points: golden to the right, mine upwards', async () => {
  const { made, canvas } = scatter();
  await made.show(1);
  const points = drawn.filter(one => one.name === 'fillRect').map(one => one.args.slice(0, 2));
  expect(points).toEqual([
    [0, 0],
    [97.5, 97.5],
  ]);
  expect(canvas.getAttribute('aria-label')).toBe('Golden against mine, 2 elements from 0 to 4');
  expect(texts(made.root, '.llmdebug-caption span')).toEqual(['0', 'golden → · mine ↑', '4']);
});

test('many elements are a density, whose empty cells let the diagonal through', async () => {
  const { made, canvas } = scatter();
  await made.show(2);
  const [topLeft, topRight, bottomLeft, bottomRight] = pixels(drawn);
  expect([topLeft, bottomRight]).toEqual([0, 0]);
  expect(topRight).not.toBe(0);
  expect(bottomLeft).not.toBe(0);
  expect(bottomLeft).not.toBe(topRight); // four elements and one
  expect([canvas.dataset.kind, canvas.getAttribute('aria-label')]).toEqual([
    'density',
    'Golden against mine, 5 elements from -1 to 1, 3 with NaN or inf',
  ]);
});

test('the pointer tells the values under it, and in a density how many elements', async () => {
  const { made, told, point, canvas } = scatter();
  await made.show(1);
  point(50, 0);
  expect(told()).toBe('golden 2 · mine 4');
  await made.show(2);
  point(1, 99);
  expect(told()).toBe('golden -0.98 · mine -0.98 · 4 elements');
  canvas.dispatchEvent(new Event('pointerleave'));
  expect(told()).toBe('On the diagonal, the two values are equal.');
});

test('what cannot be read is not shown, and the tensor before neither', async () => {
  const { made } = scatter();
  await made.show(1);
  await made.show(9);
  expect(made.root.hidden).toBe(true);
  await made.show(2);
  expect(made.root.hidden).toBe(false);
});

test('the reply to an earlier tensor does not overwrite the later one', async () => {
  const { made, kernel, canvas } = scatter();
  kernel.held = true;
  void made.show(2);
  void made.show(1);
  await kernel.reply(1, 0);
  expect(canvas.dataset.kind).toBe('points');
});

test('without a difference the kernel is not asked', async () => {
  const { made, kernel } = scatter();
  await made.show(-1);
  expect(kernel.of('scatter')).toEqual([]);
});
