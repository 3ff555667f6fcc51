import { expect, test, vi } from 'vitest';
import type { Connection } from '../src/protocol/messages';
import { PageModel } from '../src/protocol/page_model';

test('a trait that changes is announced, one that is set to its value is not', () => {
  const model = new PageModel({ position: 1 }, { send: () => undefined });
  const changed = vi.fn();
  model.on('change:position', changed);
  model.set('position', 1);
  expect(changed).not.toHaveBeenCalled();
  model.set('position', 2);
  expect([changed.mock.calls.length, model.get('position')]).toEqual([1, 2]);
});

test('messages reach all listeners, even if one removes itself, and none after off', () => {
  const connection: Connection = { send: () => undefined };
  const model = new PageModel({}, connection);
  const [once, always] = [vi.fn(() => model.off('msg:custom', once)), vi.fn()];
  model.on('msg:custom', once);
  model.on('msg:custom', always);
  connection.onMessage?.({ re: 1 }, []);
  connection.onMessage?.({ re: 2 }, []);
  expect([once.mock.calls.length, always.mock.calls.length]).toEqual([1, 2]);
});
