import { expect, test } from 'vitest';
import { Client } from '../src/protocol/client';

interface Ops {
  double: { request: { op: 'double'; n: number }; answer: { twice: number } };
}
interface Sent {
  op: string;
  n: number;
  re: number;
}

function client() {
  const sent: Sent[] = [];
  return { sent, client: new Client<Ops>(message => void sent.push(message as Sent), 7) };
}

test('a request carries its operation, its arguments and a number', () => {
  const { sent, client: asking } = client();
  void asking.ask('double', { n: 2 });
  void asking.ask('double', { n: 3 });
  expect(sent).toEqual([
    { op: 'double', n: 2, re: 7 },
    { op: 'double', n: 3, re: 8 },
  ]);
});

test('a reply to any number of a request answers it, once', async () => {
  const { client: asking } = client();
  const reply = asking.ask('double', { n: 2 });
  asking.send(asking.pending[0]!);
  expect(asking.receive({ re: 8, twice: 4 } as object, [])).toBe(true);
  expect(asking.receive({ re: 7, twice: 5 } as object, [])).toBe(false);
  expect((await reply).answer.twice).toBe(4);
});

test('a message without a number answers nothing', () => {
  const { client: asking } = client();
  void asking.ask('double', { n: 2 });
  expect(asking.receive({ error: 'broken' }, [])).toBe(false);
  expect(asking.receive({ re: null }, [])).toBe(false);
  expect(asking.pending).toHaveLength(1);
});

test('an error rejects the request with its text', async () => {
  const { client: asking } = client();
  const reply = asking.ask('double', { n: 2 });
  asking.receive({ re: 7, error: 'no such thing' }, []);
  await expect(reply).rejects.toThrow('no such thing');
});

test('a request that cannot be sent is rejected and not pending', async () => {
  const asking = new Client<Ops>(() => {
    throw new Error('closed');
  });
  await expect(asking.ask('double', { n: 2 })).rejects.toThrow('closed');
  expect(asking.pending).toHaveLength(0);
});

test('a failed connection rejects all pending requests', async () => {
  const { client: asking } = client();
  const replies = [asking.ask('double', { n: 2 }), asking.ask('double', { n: 3 })];
  asking.fail(new Error('gone'));
  for (const reply of replies) await expect(reply).rejects.toThrow('gone');
  expect(asking.pending).toHaveLength(0);
});
