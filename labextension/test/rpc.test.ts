import type { AnyModel } from '@anywidget/types';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { Rpc } from '../src/widget/rpc';

interface Sent {
  op: string;
  path?: string;
  re: number;
}

/** A client on a fake model; `answer` plays the kernel. */
function channel() {
  const [sent, waits, errors]: [Sent[], string[], string[]] = [[], [], []];
  const heard = new Map<string, (content: object) => void>();
  const model = {
    on: (event: string, then: (content: object) => void) => heard.set(event, then),
    off: (event: string) => heard.delete(event),
    send: (message: Sent) => sent.push(message),
  };
  const rpc = new Rpc(
    model as unknown as AnyModel,
    wait => waits.push(wait),
    text => errors.push(text),
  );
  const answer = (re: number, more: object = {}) =>
    heard.get('msg:custom')?.({ re, ids: [re], ...more });
  return {
    rpc,
    sent,
    waits,
    errors,
    heard,
    answer,
    close: () => heard.get('comm_live_update')?.({}),
  };
}

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

test('each reply resolves its own request, in any order', async () => {
  const { rpc, sent, answer } = channel();
  const asked = ['a', 'b', 'c'].map(path => rpc.ask('path', { path }));
  const numbers = sent.map(message => message.re);
  answer(numbers[2]!);
  answer(numbers[0]!);
  expect(sent.at(-1)!.path).toBe('b'); // overtaken, so it is sent again
  answer(numbers[1]!);
  expect((await Promise.all(asked)).map(reply => reply!.answer.ids)).toEqual(
    numbers.map(re => [re]),
  );
  expect(rpc.idle).toBe(true);
});

test('an error is shown once and resolves to undefined', async () => {
  const { rpc, sent, errors, answer } = channel();
  const asked = rpc.ask('path', { path: 'a' });
  answer(sent[0]!.re, { error: 'no such thing' });
  expect(await asked).toBeUndefined();
  answer(sent[0]!.re, { error: 'no such thing' });
  expect(errors).toEqual(['no such thing']);
});

test('a silent kernel is busy, then dead, and busy again after a reply', async () => {
  const { rpc, sent, waits, answer } = channel();
  const asked = rpc.ask('path', { path: 'slow' });
  vi.advanceTimersByTime(400);
  expect(waits.at(-1)).toBe('busy');
  vi.advanceTimersByTime(11_000);
  expect(waits.at(-1)).toBe('dead');
  answer(sent.at(-1)!.re); // a probe
  expect(waits.at(-1)).toBe('busy');
  answer(sent[0]!.re);
  expect((await asked)?.answer.ids).toEqual([sent[0]!.re]);
});

test('a closed channel is reported at once, until a message arrives', () => {
  const { rpc, sent, waits, answer, close } = channel();
  close();
  expect(waits).toEqual(['gone']);
  void rpc.ask('path', { path: 'a' });
  vi.advanceTimersByTime(60_000);
  expect(new Set(waits)).toEqual(new Set(['gone']));
  answer(sent[0]!.re);
  expect(waits.at(-1)).not.toBe('gone');
});

test('a request is sent at most three times', () => {
  const { rpc, sent, answer } = channel();
  void rpc.ask('path', { path: 'lost' });
  for (let i = 0; i < 10; i++) {
    void rpc.ask('path', { path: 'next' });
    answer(sent.filter(message => message.path === 'next').at(-1)!.re);
  }
  expect(sent.filter(message => message.path === 'lost')).toHaveLength(3);
});

test('a disposed client sends nothing', () => {
  const { rpc, sent, heard } = channel();
  void rpc.ask('path', { path: 'a' });
  rpc.dispose();
  expect(heard.size).toBe(0);
  vi.advanceTimersByTime(60_000);
  expect(sent).toHaveLength(1);
});
