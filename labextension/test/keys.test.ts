// @vitest-environment happy-dom
import { beforeEach, expect, test, vi } from 'vitest';
import { onKeys } from '../src/widget/keys';

const root = document.createElement('div');
const actions = { n: vi.fn(), N: vi.fn() };
const outside = vi.fn();
document.body.append(root);
document.body.addEventListener('keydown', outside);
onKeys(root, actions);

beforeEach(() => void vi.clearAllMocks());

function press(tag: string, key: string, more: KeyboardEventInit = {}): HTMLElement {
  const target = document.createElement(tag);
  root.replaceChildren(target);
  target.dispatchEvent(
    new KeyboardEvent('keydown', { key, bubbles: true, composed: true, ...more }),
  );
  return target;
}

test('each key does what it is for, and the shift key counts', () => {
  press('button', 'n');
  expect(actions.n).toHaveBeenCalledOnce();
  expect(actions.N).not.toHaveBeenCalled();
  press('button', 'N');
  expect(actions.N).toHaveBeenCalledOnce();
});

test.each(['input', 'select', 'textarea'])('letters typed into a %s do nothing', tag => {
  press(tag, 'n');
  expect(actions.n).not.toHaveBeenCalled();
});

test('letters never reach Jupyter', () => {
  press('button', 'x');
  press('input', 'd');
  expect(outside).not.toHaveBeenCalled();
});

test.each([
  ['s', { ctrlKey: true }],
  ['n', { metaKey: true }],
  ['Escape', {}],
  ['Enter', { shiftKey: true }],
])('%s with %o stays a shortcut of Jupyter', (key, more) => {
  const target = press('button', key, more);
  expect(actions.n).not.toHaveBeenCalled();
  expect(outside).toHaveBeenCalledOnce();
  expect(target.hasAttribute('data-lm-suppress-shortcuts')).toBe(false);
});

test('plain keys are hidden from Jupyter before it reads them', () => {
  expect(press('button', 'd').hasAttribute('data-lm-suppress-shortcuts')).toBe(true);
});
