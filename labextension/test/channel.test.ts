import type { Kernel } from '@jupyterlab/services';
import { expect, test } from 'vitest';
import { Channel } from '../src/plugin/channel';

interface Comm {
  isDisposed: boolean;
  onMsg: (message: { content: { data: object }; buffers?: ArrayBuffer[] }) => void;
  onClose: () => void;
}

function channel() {
  const sent: { re: number }[] = [];
  const comm = {
    isDisposed: false,
    open: () => undefined,
    close: () => undefined,
    send: (message: { re: number }) => void sent.push(message),
  };
  const opened = new Channel(comm as unknown as Kernel.IComm, 'the kernel is gone');
  return { channel: opened, comm: comm as unknown as Comm, sent };
}

test('a reply resolves its request; other messages and their buffers go on', async () => {
  const { channel: asking, comm, sent } = channel();
  const foreign: [object, number[]][] = [];
  asking.onMessage = (message, buffers) =>
    foreign.push([message, buffers.map(buffer => buffer.byteLength)]);
  const answer = asking.ask('delete', { path: 'a' });
  comm.onMsg({ content: { data: { re: 2 ** 39 } }, buffers: [new ArrayBuffer(12)] });
  comm.onMsg({ content: { data: { re: sent[0]!.re, path: 'a' } } });
  expect((await answer).path).toBe('a');
  expect(foreign).toEqual([[{ re: 2 ** 39 }, [12]]]);
});

test('a closed channel rejects pending and later requests', async () => {
  const { channel: asking, comm } = channel();
  const pending = asking.ask('delete', { path: 'a' });
  comm.onClose();
  await expect(pending).rejects.toThrow('the kernel is gone');
  await expect(asking.ask('delete', { path: 'b' })).rejects.toThrow('the kernel is gone');
  expect(asking.isOpen).toBe(false);
});
