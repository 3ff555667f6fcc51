// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { Heatmap, type HeatmapEvents, type Slice } from '../src/widget/heatmap';
import * as T from '../src/widget/strings';
import type { ViewRequest } from '../src/widget/wire';
import { drawing, Kernel, press, sent, settled, sized, texts, type Drawn } from './fakes';

const SLICE: Slice = { row: 1, which: 'mine', axes: [1, 2], fixed: [3, 0, 0] };
const SIZES: Record<number, [number, number]> = { 1: [4, 6], 2: [600, 600], 3: [0, 6], 4: [1, 1] };
let drawn: Drawn[];

beforeEach(() => {
  drawn = drawing();
  sized(60, 40);
});
afterEach(() => void vi.restoreAllMocks());

/** Answers like the kernel: the element at y, x is 1000 y + x, and a cell shows the last one. */
function view({ row, y0, x0, y1, x1, size }: Omit<ViewRequest, 'op'>) {
  const [rows, cols] = SIZES[row] ?? [];
  if (rows === undefined || cols === undefined) return undefined;
  const [y2, x2] = [y1 || rows, x1 || cols];
  const [fy, fx] = [Math.ceil((y2 - y0) / size) || 1, Math.ceil((x2 - x0) / size) || 1];
  const [h, w] = [Math.ceil((y2 - y0) / fy), Math.ceil((x2 - x0) / fx)];
  const values = Float32Array.from({ length: h * w }, (_, i) => {
    const y = Math.min(y2, y0 + (Math.floor(i / w) + 1) * fy) - 1;
    return 1000 * y + Math.min(x2, x0 + ((i % w) + 1) * fx) - 1;
  });
  return sent({ h, w, fy, fx, y0, x0, y1: y2, x1: x2, rows, cols, lo: 0, hi: 9 }, values);
}

function heatmap(events: HeatmapEvents = {}) {
  const kernel = new Kernel({ view });
  const made = new Heatmap(kernel.ask, events);
  document.body.replaceChildren(made.root);
  const canvas = made.root.querySelector('canvas')!;
  canvas.setPointerCapture = () => undefined;
  const show = async (more: Partial<Slice> = {}) => {
    made.show({ ...SLICE, ...more });
    await settled();
  };
  const caption = () => made.root.querySelector('.llmdebug-caption')!.textContent;
  const value = () => made.root.querySelector('.llmdebug-value')!.textContent;
  const window = () => {
    const { y0, x0, y1, x1 } = made.view!;
    return [y0, x0, y1, x1];
  };
  const at = (type: string, x: number, y: number, more: PointerEventInit = {}) => {
    const event = new PointerEvent(type, { clientX: x, clientY: y, ...more });
    Object.defineProperties(event, { offsetX: { value: x }, offsetY: { value: y } });
    return canvas.dispatchEvent(event);
  };
  return { made, kernel, canvas, show, caption, value, window, at };
}

test('a slice says its size and the window in view, in its axes, as text', async () => {
  const { canvas, show, caption } = heatmap();
  await show({ names: ['<b>token</b>', 'feature'] });
  expect(caption()).toBe('<b>token</b> 0–3 ↓, feature 0–5 →');
  expect(canvas.getAttribute('aria-label')).toBe(
    'Heat map of a 4 by 6 slice, <b>token</b> 0–3 ↓, feature 0–5 →',
  );
  expect(canvas.getAttribute('aria-busy')).toBe('false');
});

test('the request is for the whole slice, and holds nothing else', async () => {
  const { kernel, show } = heatmap();
  await show({ names: ['a', 'b'] });
  const { row, which, axes, fixed } = SLICE;
  expect(kernel.of('view')).toEqual([
    { row, which, axes, fixed, y0: 0, x0: 0, y1: 0, x1: 0, size: 256 },
  ]);
});

test('cells that cover several elements say so; an empty tensor and a scalar, too', async () => {
  const { show, caption } = heatmap();
  await show({ row: 2 });
  expect(caption()).toContain('each cell shows the largest magnitude of 3 × 3');
  await show({ row: 3 });
  expect(caption()).toBe(T.empty);
  await show({ row: 4 });
  expect(caption()).toBe('scalar');
});

test('numbers are written into cells that have room for them', async () => {
  const { canvas, show } = heatmap();
  await show();
  expect(canvas.dataset.numbers).toBe('false');
  vi.restoreAllMocks();
  drawn = drawing();
  sized(600, 400);
  await show();
  expect(canvas.dataset.numbers).toBe('true');
  const written = drawn.filter(one => one.name === 'fillText').map(one => one.args[0]);
  expect(written.slice(0, 2)).toEqual(['0', '1']);
});

test('keys zoom, pan and reset; others stay those of the page', async () => {
  const { canvas, show, window } = heatmap();
  await show({ row: 2 });
  press(canvas, '+');
  await settled();
  expect(window()).toEqual([150, 150, 450, 450]);
  press(canvas, 'ArrowRight');
  press(canvas, 'ArrowUp');
  await settled();
  expect(window()).toEqual([75, 225, 375, 525]);
  press(canvas, '-');
  await settled();
  expect(window()).toEqual([0, 0, 600, 600]);
  press(canvas, '=');
  press(canvas, '0');
  await settled();
  expect(window()).toEqual([0, 0, 600, 600]);
  expect(press(canvas, '+', { ctrlKey: true }).defaultPrevented).toBe(false);
  expect(press(canvas, 'n').defaultPrevented).toBe(false);
});

test('the wheel zooms at the pointer, and scrolls the page where zooming ends', async () => {
  const { canvas, show, window } = heatmap();
  await show({ row: 2 });
  const wheel = (deltaY: number) => {
    const event = new WheelEvent('wheel', { deltaY, deltaMode: 0, cancelable: true });
    Object.defineProperties(event, { offsetX: { value: 0 }, offsetY: { value: 40 } });
    canvas.dispatchEvent(event);
    return event.defaultPrevented;
  };
  expect(wheel(100)).toBe(false);
  expect(wheel(-100)).toBe(true);
  await settled();
  expect(window()).toEqual([300, 0, 600, 300]);
});

test('dragging pans; a press without a movement shows the value of the element', async () => {
  const moved = vi.fn();
  const { canvas, show, window, value, at } = heatmap({ moved });
  await show({ row: 2 });
  press(canvas, '+');
  await settled();
  at('pointerdown', 30, 20, { button: 0 });
  at('pointermove', 36, 20);
  at('lostpointercapture', 36, 20);
  await settled();
  expect(window()).toEqual([150, 120, 450, 420]);
  expect([moved.mock.calls.length, value()]).toEqual([2, '']);
  await show();
  at('pointerdown', 15, 15, { button: 0 });
  at('lostpointercapture', 15, 15);
  await settled();
  expect(value()).toBe('[3, 1, 1] = 1001');
});

test('a cell that covers many elements is looked into for the one that it shows', async () => {
  const picked = vi.fn();
  const { canvas, show, value } = heatmap({ picked });
  await show({ row: 2 });
  press(canvas, 'Enter'); // the middle: cell 100, 100 of 200, elements 300 to 302
  await settled();
  expect(value()).toBe('[3, 302, 302] = 302302');
  expect(picked.mock.calls).toEqual([[{ y: 302, x: 302 }]]);
});

test('the pointer tells the element under it', async () => {
  const pointed = vi.fn();
  const { made, show, at } = heatmap({ pointed });
  await show();
  at('pointermove', 59, 39);
  at('pointerleave', 0, 0);
  expect(pointed.mock.calls).toEqual([[{ y: 3, x: 5 }], [null]]);
  expect([made.valueAt({ y: 3, x: 5 }), made.valueAt(null)]).toEqual([3005, null]);
  expect(made.where({ y: 3, x: 5 })).toBe('[3, 3, 5]');
});

test('an element is fetched and shown, whatever the window', async () => {
  const { made, kernel, show, value } = heatmap();
  await made.mark({ y: 0, x: 0 }); // nothing is shown yet
  await show({ row: 2 });
  await made.mark({ y: 599, x: 1 });
  expect(kernel.of('view').at(-1)).toMatchObject({ y0: 599, x0: 1, y1: 600, x1: 2, size: 1 });
  expect(value()).toBe('[3, 599, 1] = 599001');
});

test('colours can be those of a given range', async () => {
  const { made, show } = heatmap();
  await show();
  made.paintBetween(-4, 4, true);
  expect(texts(made.root, '.llmdebug-legend > span:not([class])')).toEqual(['-4', '4']);
});

test('after an error nothing of the tensor before is left', async () => {
  const { made, canvas, show, caption } = heatmap();
  await show();
  await show({ row: 9 });
  expect([caption(), canvas.getAttribute('aria-label')]).toEqual([T.unreadable, T.unreadable]);
  expect([made.view, texts(made.root, '.llmdebug-legend > span:not([class])')]).toEqual([
    null,
    ['', ''],
  ]);
  expect(drawn.at(-1)!.name).toBe('clearRect');
});

test('the slice that was chosen last is shown, and those between are not asked for', async () => {
  const { made, kernel, caption, canvas } = heatmap();
  kernel.held = true;
  made.show(SLICE);
  made.show({ ...SLICE, row: 2 });
  made.show({ ...SLICE, row: 4 });
  expect(canvas.getAttribute('aria-busy')).toBe('true');
  await kernel.reply();
  await kernel.reply();
  expect(kernel.of('view').map(one => one.row)).toEqual([1, 4]);
  expect(caption()).toBe('scalar');
});

test('a window that was chosen while one could not be read is shown', async () => {
  const { made, kernel, show, window } = heatmap();
  await show();
  SIZES[1] = undefined as never;
  kernel.held = true;
  made.look({ y0: 0, x0: 0, y1: 2, x1: 2 });
  SIZES[1] = [4, 6];
  made.look({ y0: 2, x0: 2, y1: 4, x1: 6 });
  await kernel.reply();
  await kernel.reply();
  expect(window()).toEqual([2, 2, 4, 6]);
});

test('the element that was asked for last is shown', async () => {
  const { made, kernel, show, value } = heatmap();
  await show();
  kernel.held = true;
  void made.mark({ y: 1, x: 1 });
  void made.mark({ y: 2, x: 2 });
  await kernel.reply(1, 0);
  expect(value()).toBe('[3, 2, 2] = 2002');
});

test('an element of the tensor before is not shown in the next one', async () => {
  const { made, kernel, show, value } = heatmap();
  await show();
  kernel.held = true;
  void made.mark({ y: 1, x: 1 });
  made.show({ ...SLICE, row: 4 });
  await kernel.reply();
  expect(value()).toBe('');
});
