// @vitest-environment happy-dom
import { expect, test } from 'vitest';
import { Status } from '../src/widget/status';
import * as T from '../src/widget/strings';

const failed = (status: Status) => status.root.classList.contains('llmdebug-failed');

test('messages are announced, and are text', () => {
  const status = new Status();
  status.say('<b>saved</b>');
  expect(status.root.getAttribute('role')).toBe('status');
  expect([status.root.textContent, status.root.querySelector('b')]).toEqual(['<b>saved</b>', null]);
});

test('a failure looks like one until the next message', () => {
  const status = new Status();
  status.fail('no such row');
  expect([status.root.textContent, failed(status)]).toEqual(['no such row', true]);
  status.say('');
  expect([status.root.textContent, failed(status)]).toEqual(['', false]);
});

test.each([
  ['busy', T.busy],
  ['dead', T.dead],
  ['gone', T.gone],
  ['idle', ''],
] as const)('a kernel that is %s is told beside the message', (wait, text) => {
  const status = new Status();
  status.say('here');
  status.wait('busy');
  status.wait(wait);
  expect(status.root.textContent).toBe(`here${text}`);
});
