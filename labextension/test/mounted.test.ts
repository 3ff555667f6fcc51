// @vitest-environment happy-dom
import { expect, test, vi } from 'vitest';
import { mounted } from '../src/widget/mounted';

test('an explorer comes with its style, into an element of its own', () => {
  const el = document.createElement('div');
  const mount = vi.fn((root: HTMLElement) => {
    root.textContent = 'drawn';
    return () => undefined;
  });
  mounted(el, mount);
  expect([...el.children].map(child => child.tagName)).toEqual(['STYLE', 'DIV']);
  expect(el.querySelector('.llmdebug')!.textContent).toBe('drawn');
});

test('what removes it disposes of it first, and leaves nothing', () => {
  const el = document.createElement('div');
  const dispose = vi.fn(() => expect(el.childElementCount).toBe(2));
  mounted(el, () => dispose)();
  expect([dispose.mock.calls.length, el.childElementCount]).toEqual([1, 0]);
});
