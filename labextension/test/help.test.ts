// @vitest-environment happy-dom
import { expect, test } from 'vitest';
import { Help } from '../src/widget/help';
import { named, texts } from './fakes';

function help(report: boolean) {
  const made = new Help(report);
  const before = document.createElement('button');
  document.body.replaceChildren(before, made.root);
  before.focus();
  return made;
}

test('a comparison has keys for findings and mismatches, a run has not', () => {
  expect(texts(help(true).root, 'kbd')).toEqual(expect.arrayContaining(['f', 'N P', 'e']));
  const run = texts(help(false).root, 'kbd');
  expect(run).toContain('n p');
  expect(run).not.toContain('f');
  expect(run).not.toContain('N P');
});

test('each key has its meaning', () => {
  const { root } = help(true);
  expect(root.querySelectorAll('dt').length).toBe(root.querySelectorAll('dd').length);
  expect(texts(root, 'dd').every(Boolean)).toBe(true);
});

test('the list opens with its button focused, and closes again', () => {
  const made = help(true);
  expect(made.root.open).toBe(false);
  made.turn();
  expect(made.root.open).toBe(true);
  expect(document.activeElement).toBe(named(made.root, 'Close'));
  made.turn();
  expect(made.root.open).toBe(false);
});

test('its own button closes it, and it has a name', () => {
  const made = help(false);
  made.turn();
  named(made.root, 'Close').click();
  expect([made.root.open, made.root.getAttribute('aria-label')]).toEqual([false, 'Keys']);
});
