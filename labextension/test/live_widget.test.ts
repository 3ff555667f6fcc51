// @vitest-environment happy-dom
import { Signal } from '@lumino/signaling';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { LiveWidget, widgetOf, type Document } from '../src/plugin/live_widget';
import { later } from './jupyter';

const TYPE = 'application/vnd.jupyter.widget-view+json';
const MODEL = { data: { [TYPE]: { model_id: 'a' } } } as never;

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

/** A renderer of a widget manager. It draws the widget when it is told to. */
function fakeRenderer() {
  const answer = later<void>();
  const node = document.createElement('div');
  return {
    node,
    dispose: vi.fn(),
    renderModel: () => answer.promise,
    draw: () => {
      node.append(document.createElement('b'));
      answer.resolve();
    },
    /** "Error displaying widget: model not found" */
    refuse: () => answer.resolve(),
  };
}

/** A notebook with one output whose widget is looked for. */
function notebook() {
  const made: ReturnType<typeof fakeRenderer>[] = [];
  const rendermime = {
    mimeTypes: [TYPE],
    factory: {},
    getFactory: () => rendermime.factory,
    createRenderer: () => made[made.push(fakeRenderer()) - 1],
  };
  const kernel = { connectionStatus: 'connecting' };
  const session = { session: { kernel }, connectionStatusChanged: new Signal<object, string>({}) };
  const at = {
    document: { content: { rendermime }, sessionContext: session } as object | undefined,
  };
  const drawn = vi.fn();
  const host = document.createElement('div');
  const live = new LiveWidget(host, () => at.document as Document, drawn);
  const become = (status: string) => {
    kernel.connectionStatus = status;
    session.connectionStatusChanged.emit(status);
  };
  const wait = (ms: number) => vi.advanceTimersByTimeAsync(ms);
  return { live, host, made, rendermime, at, drawn, become, wait };
}

test('a manager that takes long is asked once, and its widget is shown when it comes', async () => {
  const { live, host, made, drawn, wait } = notebook();
  live.find(MODEL);
  await wait(30_000);
  expect([made.length, made[0]!.node.hidden, drawn.mock.calls.length]).toEqual([1, true, 0]);
  made[0]!.draw();
  await wait(1);
  expect([live.isDrawn, made[0]!.node.hidden, host.childElementCount]).toEqual([true, false, 1]);
  expect(drawn).toHaveBeenCalled();
  await wait(200_000);
  expect(made.length).toBe(1);
});

test('what was made before there was a manager is replaced when the manager comes', async () => {
  const { live, host, made, rendermime, wait } = notebook();
  live.find(MODEL);
  await wait(5_000);
  rendermime.factory = {};
  await wait(10_000);
  expect(made.map(({ dispose }) => dispose.mock.calls.length)).toEqual([1, 0]);
  expect([...host.children]).toEqual([made[1]!.node]);
});

test('a manager that knows no such widget is asked ever less often, and then no more', async () => {
  const { live, made, wait } = notebook();
  live.find(MODEL);
  for (const ms of [500, 1000, 2000, 4000, 200_000, 200_000]) {
    made.at(-1)!.refuse();
    await wait(ms);
  }
  const asked = made.length;
  made.at(-1)!.refuse();
  await wait(1_000_000);
  expect([asked > 3, made.length - asked]).toEqual([true, 0]);
});

test('each connection of the kernel begins anew', async () => {
  const { live, made, become, wait } = notebook();
  live.find(MODEL);
  made[0]!.refuse();
  await wait(20_000);
  made.at(-1)!.refuse();
  await wait(1);
  const asked = made.length;
  become('disconnected');
  expect(made.length).toBe(asked);
  become('connected');
  expect(made.length).toBe(asked + 1);
  made.at(-1)!.draw();
  await wait(1);
  become('connected');
  expect([live.isDrawn, made.length]).toEqual([true, asked + 1]);
});

test('a renderer that fails is one that did not draw', async () => {
  const { live, made, rendermime, wait } = notebook();
  rendermime.createRenderer = () =>
    made[made.push({ ...fakeRenderer(), renderModel: () => Promise.reject(new Error('bad')) }) - 1];
  live.find(MODEL);
  await wait(1_000);
  expect([live.isDrawn, made.length > 1]).toEqual([false, true]);
});

test('a notebook that is found late, or draws no widgets yet, is looked at again', async () => {
  const { live, made, at, rendermime, wait } = notebook();
  const { document } = at;
  at.document = undefined;
  rendermime.mimeTypes = [];
  live.find(MODEL);
  at.document = document;
  await wait(500);
  rendermime.mimeTypes = [TYPE];
  expect(made).toEqual([]);
  await wait(1_000);
  expect(made.length).toBe(1);
});

test('nothing is asked for an output without a widget, nor once it is gone', async () => {
  const { live, host, made, become, wait } = notebook();
  live.find({ data: {} } as never);
  await wait(1_000);
  expect(host.childElementCount).toBe(0);
  live.find(MODEL);
  live.dispose();
  const asked = made.length;
  become('connected');
  await wait(200_000);
  expect([made.length, host.childElementCount]).toEqual([asked, 0]);
});

test('the id of a widget is told apart from that of another', () => {
  expect(widgetOf(MODEL)).not.toBe(widgetOf({ data: { [TYPE]: { model_id: 'b' } } } as never));
  expect(widgetOf({ data: {} } as never)).toBe('');
});
