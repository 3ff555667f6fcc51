// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { DIVERGED, MADE, NOTHING } from '../src/widget/layererrors';
import * as T from '../src/widget/strings';
import { Timeline } from '../src/widget/timeline';
import type { LayerMap } from '../src/widget/wire';
import { drawing, Kernel, overview, press, row, sent, settled, sized, step, texts } from './fakes';
import type { Drawn } from './fakes';

const MATCH = 3;
/** Layer by layer, a state for each of two steps. */
const STATES = [MATCH, MATCH, DIVERGED, MATCH, MATCH, MADE];
const WIDTH = 100; // (420 - 120 for the names) / 3 layers
const HEIGHT = 18;
let drawn: Drawn[];
const shown: Timeline[] = [];

beforeEach(() => {
  drawn = drawing();
  sized(420, 300);
});
afterEach(() => {
  shown.splice(0).forEach(one => one.dispose()); // else it paints into the next test
  vi.restoreAllMocks();
});

function layers(states = STATES, count = 3) {
  const answer: LayerMap = {
    layers: [0, 1, 2].slice(0, count).map(i => ({ path: `layers.${i}`, type: 'Layer', node: i })),
    steps: 2,
    differing: [''],
  };
  const error = Float32Array.from(states, state => (state > MATCH ? 0.5 : 0));
  const limit = Float32Array.from(states, () => 0.1);
  const rows = Int32Array.from(states, (state, i) => (state === NOTHING ? -1 : i));
  const share = Float32Array.from(states, () => NaN);
  return sent(answer, error, limit, rows, Uint8Array.from(states), share, new Int32Array(6));
}

async function timeline(answers = [layers()], wait = true) {
  let asked = 0;
  const kernel = new Kernel({
    layers: () => answers[Math.min(asked++, answers.length - 1)],
    calls: ({ layer }) => ({
      cells: [
        { label: 'norm', path: `layers.${layer}.norm`, row: 50, state: MATCH },
        { label: 'mlp', path: `layers.${layer}.mlp`, row: 51, state: DIVERGED },
      ].map(one => ({ ...one, error: null, limit: null, differing: '' })),
      total: 2,
    }),
  });
  kernel.held = !wait;
  const events = { choose: vi.fn(), position: vi.fn() };
  const made = new Timeline(kernel.ask, overview({ title: '<b>a</b> against b' }), events);
  shown.push(made);
  document.body.replaceChildren(made.root);
  await settled();
  const grid = made.root.querySelector<HTMLElement>('[role=grid]')!;
  const cell = made.root.querySelector('[role=gridcell]')!;
  const told = () => made.root.querySelector('.llmdebug-told')!.textContent;
  const body = made.root.querySelector('.llmdebug-time-body')!;
  const click = (layer: number, at: number) =>
    body.dispatchEvent(
      new MouseEvent('click', { clientX: layer * WIDTH + 9, clientY: at * HEIGHT + 9 }),
    );
  return { made, kernel, events, grid, cell, told, body, click };
}
const place = (cell: Element) =>
  ['aria-colindex', 'aria-rowindex'].map(name => Number(cell.getAttribute(name)) - 1);

test('it opens at the first cell that makes an error, with the calls of its layer', async () => {
  const { made, kernel, cell } = await timeline();
  expect(place(cell)).toEqual([2, 1]);
  expect(cell.getAttribute('aria-label')).toBe(
    'layers.2 · 1 decode: diverged, made here, error 0.5, limit 0.1, 5 × the limit',
  );
  expect(kernel.of('calls')).toEqual([{ layer: 2, step: 1, n: 1000 }]);
  expect(texts(made.root, '.llmdebug-strip button')).toEqual(['norm', 'mlp ⤵']);
});

test('titles and names of layers and tokens are text', async () => {
  const { made } = await timeline();
  expect(made.root.querySelector('.llmdebug-title')!.textContent).toBe('<b>a</b> against b');
  expect(texts(made.root, '.llmdebug-time-heads span')).toEqual(['0', '1', '2']);
  expect(texts(made.root, '.llmdebug-time-names > span')).toEqual(['0 prefill', '1 decode']);
});

test('each cell is drawn; where the error is made there is a cross on it', async () => {
  await timeline();
  const cells = drawn.filter(one => one.name === 'fillRect').slice(-6);
  expect(cells.map(one => one.args.slice(0, 2))).toEqual([
    [0, 0],
    [100, 0],
    [200, 0],
    [0, 18],
    [100, 18],
    [200, 18],
  ]);
  const crosses = drawn.filter(one => one.name === 'moveTo').slice(-2);
  expect(crosses.map(one => (one.args as number[])[0]! > 200)).toEqual([true, true]);
});

test('arrow keys move the cursor and tell what is there, Enter selects it', async () => {
  const { events, grid, cell, told } = await timeline();
  press(grid, 'ArrowLeft');
  press(grid, 'ArrowUp');
  expect(place(cell)).toEqual([1, 0]);
  expect(told()).toContain('layers.1 · 0 prefill: diverged, inherited');
  expect(grid.getAttribute('aria-activedescendant')).toBe(cell.id);
  expect(events.choose).not.toHaveBeenCalled();
  press(grid, 'Enter');
  expect(events.choose).toHaveBeenLastCalledWith(2, 0);
});

test('the cursor stops at the edges', async () => {
  const { grid, cell } = await timeline();
  press(grid, 'Home');
  press(grid, 'PageUp');
  press(grid, 'ArrowUp');
  expect(place(cell)).toEqual([0, 0]);
  press(grid, 'End');
  press(grid, 'PageDown');
  press(grid, 'ArrowRight');
  expect(place(cell)).toEqual([2, 1]);
});

test('keys with a modifier, and other keys, stay those of the page', async () => {
  const { grid, cell } = await timeline();
  expect(press(grid, 'ArrowLeft', { shiftKey: true }).defaultPrevented).toBe(false);
  expect(press(grid, 'n').defaultPrevented).toBe(false);
  expect(place(cell)).toEqual([2, 1]);
});

test('plus and minus zoom, zero shows all layers again', async () => {
  const { made, grid } = await timeline();
  const width = () => made.root.querySelector<HTMLElement>('.llmdebug-time-body')!.style.width;
  press(grid, '+');
  expect(width()).toBe('600px');
  press(grid, '+');
  press(grid, '-');
  expect(width()).toBe('600px');
  press(grid, '0');
  press(grid, '-');
  expect(width()).toBe('300px');
});

test('a click selects the row of a cell; without a record only the token changes', async () => {
  const states = [NOTHING, ...STATES.slice(1)];
  const { events, click } = await timeline([layers(states)]);
  click(1, 0);
  click(0, 0);
  expect(events.choose.mock.calls).toEqual([
    [2, 0],
    [-1, 0],
  ]);
});

test('the name of a token goes to it', async () => {
  const { made, events } = await timeline();
  const names = made.root.querySelector('.llmdebug-time-names')!;
  names.dispatchEvent(new MouseEvent('click', { clientY: HEIGHT + 2 }));
  expect(events.position.mock.calls).toEqual([[1]]);
});

test('the pointer tells what is under it; beside the cells stand the hints', async () => {
  const { body, told } = await timeline();
  body.dispatchEvent(new MouseEvent('pointermove', { clientX: 150, clientY: 5 }));
  expect(told()).toContain('layers.1 · 0 prefill');
  body.dispatchEvent(new Event('pointerleave'));
  expect(told()).toBe(T.timelineHint);
});

test('the selected row moves the cursor to its cell, and marks its call', async () => {
  const { made, cell } = await timeline();
  made.follow(row(51, { path: 'layers.0.mlp', step: 1 }));
  await settled();
  expect(place(cell)).toEqual([0, 1]);
  expect(made.root.querySelector('[aria-current]')!.textContent).toBe('mlp ⤵');
});

test('a row selected before the layers are known has the cursor, not the error', async () => {
  const { made, kernel, cell } = await timeline([layers()], false);
  made.follow(row(50, { path: 'layers.0.norm', step: 0 }));
  kernel.held = false;
  await kernel.reply();
  expect(place(cell)).toEqual([0, 0]);
  expect(made.root.querySelector('[aria-current]')!.textContent).toBe('norm');
});

test('new verdicts are shown, and the cursor stays at the selected row', async () => {
  const fine = layers(STATES.map(() => MATCH));
  const { made, cell } = await timeline([layers(), fine]);
  made.follow(row(51, { path: 'layers.1.mlp', step: 0 }));
  await settled();
  made.take(overview());
  await settled();
  expect(place(cell)).toEqual([1, 0]);
  expect(cell.getAttribute('aria-label')).toContain('layers.1 · 0 prefill: match');
});

test('another comparison opens at its own error', async () => {
  const { made, cell } = await timeline();
  made.follow(row(51, { path: 'layers.1.mlp', step: 0 }));
  await settled();
  made.take(overview({ inside: true }));
  await settled();
  expect(place(cell)).toEqual([2, 1]);
});

test('layers of an earlier comparison do not overwrite those of the later one', async () => {
  const { made, kernel, cell } = await timeline([layers(), layers(STATES.map(() => MATCH))], false);
  made.take(overview());
  kernel.held = false;
  await kernel.reply(1, 0);
  expect(cell.getAttribute('aria-label')).toContain('match');
  expect(place(cell)).toEqual([0, 0]);
});

test('the selected token is marked', async () => {
  const { made } = await timeline();
  made.show(1);
  const now = made.root.querySelector<HTMLElement>('.llmdebug-now')!;
  expect(now.style.top).toBe('18px');
  await vi.waitFor(() => expect(texts(made.root, '.llmdebug-time-now')).toEqual([step(1).label]));
});

test('without layers, or after an error, there is no map', async () => {
  const none = await timeline([layers([], 0)]);
  expect(none.made.root.hidden).toBe(true);
  const broken = await timeline([undefined as never]);
  press(broken.grid, 'Enter');
  expect(broken.events.choose).not.toHaveBeenCalled();
});

test('it leaves no listener behind', async () => {
  const { made } = await timeline();
  const cancelled = vi.spyOn(globalThis, 'cancelAnimationFrame');
  made.dispose();
  document.body.className = 'other';
  await settled();
  expect(cancelled.mock.calls.length).toBeGreaterThan(0);
  const painted = drawn.length;
  await new Promise(done => requestAnimationFrame(done));
  expect(drawn.length).toBe(painted);
});
