// @vitest-environment happy-dom
import { expect, test, vi } from 'vitest';
import { Foot } from '../src/widget/foot';
import { Status } from '../src/widget/status';
import * as T from '../src/widget/strings';
import { named } from './fakes';

function foot(report = true, drawer = true, saves = true) {
  const events = { walk: vi.fn(), help: vi.fn(), opened: vi.fn(), popOut: vi.fn() };
  const save = vi.fn();
  const status = new Status();
  const made = new Foot(report, drawer, status, { ...events, save: saves ? save : undefined });
  const press = (name: string) =>
    [...made.root.querySelectorAll('button')].find(one => one.textContent.includes(name))!.click();
  return { made, events, save, status, press };
}

test('records and mismatches are walked through in both directions', () => {
  const { events, press } = foot();
  press(T.previousRecord);
  press(T.nextRecord);
  press(T.previousMismatch);
  press(T.nextMismatch);
  expect(events.walk.mock.calls).toEqual([
    [-1, false],
    [1, false],
    [-1, true],
    [1, true],
  ]);
});

test('a run has no mismatches to walk through', () => {
  expect(foot(false).made.root.textContent).not.toContain(T.nextMismatch);
});

test('the drawer opens and closes, and says which it is', () => {
  const { made, events } = foot();
  const held = document.createElement('p');
  const drawer = made.hold(held);
  const toggle = named(made.root, T.drawer);
  expect([drawer.hidden, toggle.getAttribute('aria-expanded')]).toEqual([true, 'false']);
  expect(toggle.getAttribute('aria-controls')).toBe(drawer.id);
  toggle.click();
  expect([drawer.hidden, toggle.getAttribute('aria-expanded')]).toEqual([false, 'true']);
  expect([drawer.firstChild, events.opened.mock.calls.length]).toEqual([held, 1]);
  toggle.click();
  expect([drawer.hidden, events.opened.mock.calls.length]).toEqual([true, 1]);
});

test('a page without a drawer has no button for it', () => {
  expect(named(foot(false, false).made.root, T.drawer)).toBeUndefined();
});

test('each format is saved by a button with a name', () => {
  const { made, save } = foot();
  const group = made.root.querySelector(`[aria-label='${T.save}']`)!;
  group.querySelectorAll('button').forEach(one => one.click());
  expect(save.mock.calls).toEqual([['html'], ['svg'], ['png']]);
  expect(group.querySelector('button')!.getAttribute('aria-label')).toBe(`HTML: ${T.saveAs.html}`);
});

test('a saved page cannot be saved again', () => {
  expect(foot(true, true, false).made.root.querySelector('[role=group]')).toBeNull();
});

test('messages stand in it; the keys and a tab of its own have buttons', () => {
  const { made, events, status } = foot();
  status.say('copied');
  expect(made.root.textContent).toContain('copied');
  named(made.root, T.keysTitle).click();
  named(made.root, T.popOut).click();
  expect([events.help.mock.calls.length, events.popOut.mock.calls.length]).toEqual([1, 1]);
});
