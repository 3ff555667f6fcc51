// @vitest-environment happy-dom
import { expect, test, vi } from 'vitest';
import { button, clamp, h, hasFocus, morph, uniqueId } from '../src/widget/dom';

test('text from the kernel stays text', () => {
  const markup = '<img src=x onerror=alert(1)>';
  const el = h('p', { title: markup }, markup);
  expect([el.childElementCount, el.textContent, el.title]).toEqual([0, markup, markup]);
});

test('true is an empty attribute; false, undefined and null leave nothing', () => {
  const el = h('input', { hidden: true, disabled: false, title: undefined });
  expect(el.getAttributeNames()).toEqual(['hidden']);
  expect(h('p', {}, null, undefined, 'a').textContent).toBe('a');
});

test('a button calls its function and may have another class', () => {
  const pressed = vi.fn();
  const el = button(pressed, { class: 'other' }, 'go');
  el.click();
  expect([pressed.mock.calls.length, el.className, el.type]).toEqual([1, 'other', 'button']);
});

test('morphing adds, changes and removes attributes and children', () => {
  const old = h('p', { id: 'a', title: 'x' }, 'before');
  morph(old, h('p', { id: 'b', lang: 'en' }, h('b', {}, 'after')));
  expect(old.outerHTML).toBe('<p id="b" lang="en"><b>after</b></p>');
});

test('morphing keeps equal children, so that a click on them is not lost', () => {
  const old = h('p', { title: 'x' }, h('b', {}, 'same'));
  const child = old.firstChild;
  morph(old, h('p', { title: 'y' }, h('b', {}, 'same')));
  expect([old.title, old.firstChild === child]).toEqual(['y', true]);
});

test('the focus is found inside a shadow root', () => {
  const host = h('div');
  document.body.append(host);
  const [inner, other] = [h('p', { tabindex: 0 }), h('p', { tabindex: 0 })];
  host.attachShadow({ mode: 'open' }).append(inner, other);
  inner.focus();
  expect([hasFocus(inner), hasFocus(other)]).toEqual([true, false]);
});

test('ids differ, and a value outside a range becomes its end', () => {
  expect(new Set(Array.from({ length: 100 }, uniqueId)).size).toBe(100);
  expect([clamp(5, 0, 3), clamp(-5, 0, 3), clamp(2, 0, 3)]).toEqual([3, 0, 2]);
});
