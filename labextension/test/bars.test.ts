// @vitest-environment happy-dom
import { expect, test } from 'vitest';
import { bars, BARS_HEIGHT } from '../src/widget/bars';

const heights = (picture: SVGElement) =>
  [...picture.querySelectorAll('rect')].map(bar => Number(bar.getAttribute('height')));
const plain = (n: number) => n;

test('the largest count is as high as the picture, the others are in proportion', () => {
  const picture = bars([0, 5, 10], 'counts', plain, String);
  expect(heights(picture)).toEqual([0, BARS_HEIGHT / 2, BARS_HEIGHT]);
  const tops = [...picture.querySelectorAll('rect')].map(bar => Number(bar.getAttribute('y')));
  expect(tops).toEqual([BARS_HEIGHT, BARS_HEIGHT / 2, 0]);
});

test('a single element among a million is seen, and no element is not', () => {
  expect(heights(bars([1_000_000, 1, 0], '', plain, String)).slice(1)).toEqual([1, 0]);
});

test('a bar says what it counts, as text', () => {
  const picture = bars([1, 2], 'names', plain, bar => `<b>${bar}</b>`);
  expect([...picture.querySelectorAll('title')].map(title => title.textContent)).toEqual([
    '<b>0</b>',
    '<b>1</b>',
  ]);
  expect(picture.querySelector('b')).toBeNull();
});

test('the picture has a name for those who do not see it, also without bars', () => {
  const picture = bars([], 'nothing counted', plain, String);
  expect([picture.getAttribute('role'), picture.getAttribute('aria-label')]).toEqual([
    'img',
    'nothing counted',
  ]);
  expect(picture.getAttribute('viewBox')).toBe(`0 0 1 ${BARS_HEIGHT}`);
});

test('counts that are all zero have no bars instead of infinite ones', () => {
  expect(heights(bars([0, 0], '', plain, String))).toEqual([0, 0]);
});
