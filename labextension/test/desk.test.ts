// @vitest-environment happy-dom
import { Signal } from '@lumino/signaling';
import { expect, test, vi } from 'vitest';
import type { ServiceManager } from '@jupyterlab/services';
import { Desk } from '../src/plugin/desk';
import { later, t } from './jupyter';

interface Kernel {
  name: string;
  status?: string;
}

/** A server with the kernel of an earlier page, if there is one. */
function desk(running?: Kernel, specs: { default: string } | null = { default: 'python3' }) {
  const started: string[] = [];
  const statuses: Signal<object, string>[] = [];
  const comms: { target: string; kernel: string; onClose?: () => void }[] = [];
  const reply = { status: 'ok' } as { status: string; ename?: string; evalue?: string };
  const gates: Promise<void>[] = [];
  const session = (name: string) => {
    const statusChanged = new Signal<object, string>({});
    statuses.push(statusChanged);
    const createComm = (target: string) => {
      const comm = { target, kernel: name, open: () => 0, close: () => 0, isDisposed: false };
      comms.push(comm);
      return comm;
    };
    const requestExecute = vi.fn(() => ({ done: Promise.resolve({ content: reply }) }));
    return {
      ...{ disposed: new Signal({}), kernelChanged: new Signal({}), statusChanged },
      shutdown: vi.fn(() => Promise.resolve()),
      kernel: { createComm, requestExecute },
    };
  };
  const sessions = {
    ready: Promise.resolve(),
    refreshRunning: () => Promise.resolve(),
    findByPath: () => Promise.resolve(running && { id: 'old', kernel: running }),
    shutdown: vi.fn(() => Promise.resolve()),
    connectTo: vi.fn(() => session(running!.name)),
    startNew: vi.fn(async ({ kernel: { name } }: { kernel: Kernel }) => {
      started.push(name);
      await gates[started.length - 1];
      return session(name);
    }),
  };
  const services = { sessions, kernelspecs: { ready: Promise.resolve(), specs } };
  const made = new Desk(services as unknown as ServiceManager.IManager, t);
  const open = () => made.channel('llmdebug_nb.runs');
  return { made, open, sessions, started, statuses, comms, reply, gates };
}

test('the default kernel is started once, for all channels', async () => {
  const { made, open, started, comms } = desk();
  await Promise.all([open(), made.channel('llmdebug_nb.explorer')]);
  expect(started).toEqual(['python3']);
  expect(comms.map(one => one.target)).toEqual(['llmdebug_nb.runs', 'llmdebug_nb.explorer']);
});

test('a reloaded page finds its kernel again; one of another name is replaced', async () => {
  const same = desk({ name: 'python3' });
  await same.open();
  expect([same.started, same.sessions.connectTo.mock.calls.length]).toEqual([[], 1]);
  const other = desk({ name: 'julia' });
  await other.open();
  expect(other.started).toEqual(['python3']);
  expect(other.sessions.shutdown.mock.calls).toEqual([['old']]);
});

test('without any kernel it says so', async () => {
  await expect(desk(undefined, null).open()).rejects.toThrow(t.noKernel);
});

test('a kernel without our package is shut down, and named with the reason', async () => {
  const { open, reply, started } = desk();
  Object.assign(reply, { status: 'error', ename: 'ModuleNotFoundError', evalue: 'llmdebug_nb' });
  await expect(open()).rejects.toThrow('"python3" has no llmdebug-nb (ModuleNotFoundError: llm');
  reply.status = 'ok';
  await open();
  expect(started).toEqual(['python3', 'python3']);
});

test('another kernel closes the channels of the one before', async () => {
  const { made, open, started } = desk();
  const before = await open();
  made.use('');
  expect(before.isOpen).toBe(true);
  made.use('torch');
  expect(before.isOpen).toBe(false);
  await open();
  expect(started).toEqual(['python3', 'torch']);
});

test.each(['restarting', 'autorestarting', 'terminating', 'dead'])(
  'a kernel that is %s closes the channels, and the next one starts a kernel',
  async status => {
    const { open, statuses, started } = desk();
    const before = await open();
    statuses[0]!.emit('busy');
    expect(before.isOpen).toBe(true);
    statuses[0]!.emit(status);
    expect(before.isOpen).toBe(false);
    await open();
    expect(started.length).toBe(2);
  },
);

test('a kernel that was chosen while another one started is the one used', async () => {
  const { made, open, comms, gates, started, statuses } = desk();
  const slow = later<void>();
  gates.push(slow.promise);
  const asked = open();
  await vi.waitFor(() => expect(started).toEqual(['python3']));
  made.use('torch');
  const other = open();
  await other;
  slow.resolve();
  expect((await asked).isOpen).toBe(true);
  expect(comms.map(one => one.kernel)).toEqual(['torch', 'torch']);
  statuses.at(-1)!.emit('dead'); // of python3, which came last
  expect((await other).isOpen).toBe(true);
});

test('a kernel that fails to start does not undo the one chosen meanwhile', async () => {
  const { made, open, gates, started } = desk();
  const slow = later<void>();
  gates.push(slow.promise);
  const asked = open();
  await vi.waitFor(() => expect(started).toEqual(['python3']));
  made.use('torch');
  await open();
  slow.reject(new Error('no memory'));
  expect((await asked).isOpen).toBe(true);
  await open();
  expect(started).toEqual(['python3', 'torch']);
});
