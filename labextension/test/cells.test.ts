// @vitest-environment happy-dom
import { afterEach, expect, test, vi } from 'vitest';
import { classOf, legend, paint, paintsOf } from '../src/widget/cells';
import { DIVERGED, MADE, NOTHING, REWRITTEN, UNMATCHED } from '../src/widget/layererrors';
import * as T from '../src/widget/strings';
import { drawing, texts } from './fakes';

const PAINTS = { right: 'green', made: 'red', inherited: 'pink', line: 'black' };
const MATCH = 3;

afterEach(() => void vi.restoreAllMocks());

function painted(state: number, share?: number) {
  const drawn = drawing();
  const context = document.createElement('canvas').getContext('2d')!;
  paint(context, state, [10, 20, 12, 8], PAINTS, share);
  return drawn;
}

test('the legend says what each colour means', () => {
  expect(texts(legend(), ':scope > span')).toEqual(Object.values(T.legend));
});

test.each([
  [MATCH, 'green'],
  [MADE, 'red'],
  [DIVERGED, 'pink'],
  [UNMATCHED, 'green'],
  [REWRITTEN, 'green'],
])('a cell of state %i is filled with %s', (state, colour) => {
  const filled = painted(state).filter(one => one.name === 'fillRect');
  expect(filled.map(one => [one.fill, one.args])).toEqual([[colour, [10, 20, 12, 8]]]);
});

test.each<[number, string, number, number[]]>([
  [MADE, 'red', 0.75, [10, 22, 12, 6]],
  [DIVERGED, 'pink', 0.01, [10, 24, 12, 4]], // it can be seen
])('a cell of state %i is %s from below as far as tokens differ, %f', (state, fill, share, box) => {
  const filled = painted(state, share).filter(one => one.name === 'fillRect');
  expect(filled.map(one => [one.fill, one.args])).toEqual([
    ['green', [10, 20, 12, 8]],
    [fill, box],
  ]);
});

test('nothing is drawn where nothing was recorded', () => {
  expect(painted(NOTHING)).toEqual([]);
});

test('without a partner is hatched, written otherwise is striped, both inside of the cell', () => {
  const lines = (state: number) => {
    const drawn = painted(state);
    expect(drawn.map(one => one.name)).toContain('clip');
    const [from, to] = ['moveTo', 'lineTo'].map(
      name => drawn.find(one => one.name === name)!.args as [number, number],
    );
    return to![0] - from![0];
  };
  expect(lines(UNMATCHED)).toBeGreaterThan(0);
  expect(lines(REWRITTEN)).toBe(0);
  expect(painted(MATCH).map(one => one.name)).not.toContain('stroke');
});

test('each state that is not right has a class of its own', () => {
  const classes = [UNMATCHED, REWRITTEN, DIVERGED, MADE].map(classOf);
  expect(new Set(classes).size).toBe(4);
  expect(classes).not.toContain(classOf(MATCH));
});

test('a canvas takes the colours of the theme from the legend', () => {
  const root = legend();
  document.body.replaceChildren(root);
  root.querySelector<HTMLElement>('.llmdebug-cell-made')!.style.backgroundColor = 'rgb(1, 2, 3)';
  expect(paintsOf(root).made).toBe('rgb(1, 2, 3)');
});
