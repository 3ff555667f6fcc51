// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { h } from '../src/widget/dom';
import { VirtualList } from '../src/widget/virtual';
import { sized } from './fakes';

beforeEach(() => sized(200, 100));
afterEach(() => {
  vi.restoreAllMocks();
  vi.unstubAllGlobals();
});

function list(count: number, horizontal = false) {
  const painted = vi.fn();
  const names = { of: (i: number) => `item ${i}` };
  const render = (i: number) => h('button', { 'data-i': i }, names.of(i));
  const made = new VirtualList({ item: 20, horizontal, render, painted });
  document.body.replaceChildren(made.root);
  made.setCount(count);
  const shown = () =>
    [...made.root.querySelectorAll<HTMLElement>('[data-i]')].map(one => Number(one.dataset.i));
  return { made, shown, painted, names };
}

test('of a million items only those in view exist, and a few around them', () => {
  const { made, shown } = list(1_000_000);
  expect(shown()).toEqual(Array.from({ length: 11 }, (_, i) => i));
  made.reveal(500_000);
  expect(shown()).toContain(500_000);
  expect(shown().length).toBeLessThan(25);
  expect(shown()).toEqual([...shown()].sort((a, b) => a - b));
});

test('a list without items is empty', () => {
  expect(list(0).shown()).toEqual([]);
});

test('scrolling paints the items that come into view, in the next frame', async () => {
  const { made, shown } = list(1000);
  made.root.scrollTop = 2000;
  made.root.dispatchEvent(new Event('scroll'));
  await vi.waitFor(() => expect(shown()).toContain(100));
  expect(shown()).not.toContain(0);
});

test('an item that stays in view keeps its element, so that a click on it is not lost', () => {
  const { made, names } = list(10);
  const before = made.root.querySelector('[data-i="3"]');
  made.refresh();
  expect(made.root.querySelector('[data-i="3"]')).toBe(before);
  names.of = i => `other ${i}`;
  made.refresh();
  expect(made.root.querySelector('[data-i="3"]')).toBe(before);
  expect(before!.textContent).toBe('other 3');
});

test('whoever paints is told whether an item had the focus', () => {
  const { made, painted } = list(10);
  made.root.querySelector<HTMLElement>('[data-i="2"]')!.focus();
  made.refresh();
  expect(painted).toHaveBeenLastCalledWith(true);
});

test('the item under the pointer is told; below the last one there is none', () => {
  const { made } = list(3);
  const at = (clientY: number) => made.indexAt(new MouseEvent('click', { clientY }));
  expect([at(5), at(45), at(65), at(-1)]).toEqual([0, 2, -1, -1]);
});

test('a horizontal list counts to the right', () => {
  const { made, shown } = list(100, true);
  expect(shown().length).toBe(16);
  expect(made.indexAt(new MouseEvent('click', { clientX: 45 }))).toBe(2);
  expect(made.page).toBe(9);
});

test('after it is disposed of, neither sizes nor frames paint', () => {
  const disconnect = vi.fn();
  const observer = class {
    observe = () => undefined;
    disconnect = disconnect;
  };
  vi.stubGlobal('ResizeObserver', observer);
  const cancel = vi.spyOn(globalThis, 'cancelAnimationFrame');
  list(3).made.dispose();
  expect([disconnect.mock.calls.length, cancel.mock.calls.length]).toEqual([1, 1]);
});
