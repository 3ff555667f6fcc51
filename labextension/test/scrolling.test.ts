import { expect, test } from 'vitest';
import { Scrolling } from '../src/widget/scrolling';

test('items in view are painted, with six more on either side', () => {
  expect(new Scrolling(20, 1000, 200).inView(2000)).toEqual({ first: 94, last: 116, start: 1880 });
});

test('nothing beyond the first and the last item is painted', () => {
  const list = new Scrolling(20, 12, 200);
  expect(list.inView(0)).toEqual({ first: 0, last: 12, start: 0 });
  expect(new Scrolling(20, 0, 200).inView(0)).toEqual({ first: 0, last: 0, start: 0 });
});

test('a list longer than a browser allows can still be scrolled to its last item', () => {
  const list = new Scrolling(20, 10_000_000, 200);
  expect(list.extent).toBe(8_000_000);
  expect(list.inView(list.extent - 200).last).toBe(10_000_000);
});

test('every item of a long list is in view after it is revealed', () => {
  const list = new Scrolling(20, 10_000_000, 200);
  for (const index of [0, 1, 4_999_999, 9_999_998, 9_999_999]) {
    const { first, last } = list.inView(list.revealing(index, 1_000_000));
    expect(first <= index && index < last).toBe(true);
  }
});

test('revealing scrolls as little as possible to a neighbour, else to the middle', () => {
  const list = new Scrolling(20, 1000, 200);
  expect(list.revealing(5, 0)).toBe(0); // in view
  expect(list.revealing(10, 0)).toBe(20); // the next one below
  expect(list.revealing(4, 100)).toBe(80); // the next one above
  expect(list.revealing(500, 0)).toBe(9910); // far away: 90 pixels on either side
});
