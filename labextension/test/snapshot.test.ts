// @vitest-environment happy-dom
import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Widget } from '@lumino/widgets';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { renderSnapshots } from '../src/plugin/snapshot';
import { app, later, t } from './jupyter';

const TYPE = 'application/vnd.llmdebug.explorer+json';
const LIVE = 'application/vnd.jupyter.widget-view+json';

const drawn = vi.hoisted(() => ({ saved: vi.fn(), undraw: vi.fn() }));
vi.mock('../src/page/draw', () => ({ drawSaved: drawn.saved }));

beforeEach(() => {
  vi.useFakeTimers();
  drawn.undraw.mockReset();
  drawn.saved.mockReset().mockImplementation((el: HTMLElement, text: string) => {
    el.textContent = `snapshot ${text}`;
    drawn.undraw.mockImplementation(() => el.replaceChildren());
    return Promise.resolve(drawn.undraw);
  });
});
afterEach(() => void vi.useRealTimers());

type Renderer = Widget & { renderModel: (model: unknown) => Promise<void> };

/** A notebook with an output. `answers`: what the manager of widgets draws, try by try. */
async function output(data: object = { data: 'packed' }, answers: ('widget' | 'none')[] = []) {
  const lab = app();
  let made!: Renderer;
  const lives: { node: HTMLElement; dispose: () => void }[] = [];
  const createRenderer = () => {
    const live = { node: document.createElement('div'), dispose: vi.fn() };
    lives.push(live);
    return {
      ...live,
      renderModel: () => {
        if (answers[lives.length - 1] === 'widget') live.node.append(document.createElement('b'));
        return Promise.resolve();
      },
    };
  };
  const registry = {
    addFactory: ({ createRenderer: create }: { createRenderer: () => Renderer }) =>
      (made = create()),
  };
  renderSnapshots(lab as unknown as JupyterFrontEnd, registry as never, t);
  const notebook = new Widget();
  const rendermime = {
    mimeTypes: answers.length ? [LIVE] : [],
    getFactory: () => rendermime,
    createRenderer,
  };
  Object.assign(notebook, { content: { rendermime } });
  lab.shell.add(notebook, 'main');
  Widget.attach(notebook, document.body);
  await made.renderModel({ data: { [TYPE]: data, [LIVE]: {} } });
  Widget.attach(made, notebook.node);
  const wait = (ms: number) => vi.advanceTimersByTimeAsync(ms);
  const live = () => lives.at(-1)?.node;
  return { made, wait, lives, live };
}

test('without a widget the snapshot is drawn, after a moment', async () => {
  const { made, wait } = await output();
  await wait(500);
  expect(made.node.textContent).toBe('');
  await wait(200);
  expect(made.node.textContent).toBe('snapshot packed');
});

test('a widget that lives is shown, and no snapshot flashes up', async () => {
  const { made, wait, live } = await output({ data: 'packed' }, ['widget']);
  await wait(5000);
  expect([live()!.hidden, made.node.querySelector('b')]).toEqual([false, expect.anything()]);
  expect(drawn.saved).not.toHaveBeenCalled();
});

test('a widget that comes late replaces the snapshot', async () => {
  const { made, wait, live, lives } = await output({ data: 'packed' }, ['none', 'none', 'widget']);
  await wait(700);
  expect(made.node.textContent).toBe('snapshot packed');
  expect(live()!.hidden).toBe(true);
  await wait(2000);
  expect([made.node.textContent, live()!.hidden]).toEqual(['', false]);
  expect(drawn.undraw).toHaveBeenCalledOnce();
  expect(lives.slice(0, -1).every(one => vi.mocked(one.dispose).mock.calls.length === 1)).toBe(
    true,
  );
  await wait(100_000);
  expect(lives.length).toBe(3);
});

test('a snapshot that is unpacked after the widget came is removed again', async () => {
  const slow = later<() => void>();
  drawn.saved.mockImplementation(() => slow.promise);
  const { wait, live } = await output({ data: 'packed' }, ['none', 'none', 'widget']);
  await wait(2000);
  slow.resolve(drawn.undraw);
  await wait(1);
  expect([drawn.undraw.mock.calls.length, live()!.hidden]).toEqual([1, false]);
});

test('a snapshot that cannot be unpacked is no error once the widget came', async () => {
  const slow = later<() => void>();
  drawn.saved.mockImplementation(() => slow.promise);
  const { made, wait } = await output({ data: 'packed' }, ['none', 'none', 'widget']);
  await wait(2000);
  slow.reject(new Error('broken'));
  await wait(1);
  expect(made.node.textContent).toBe('');
});

test.each([
  ['none', {}],
  ['no text', { data: 7 }],
  ['far larger than what we write', { data: 'x'.repeat(2_000_001) }],
])('a snapshot that is %s is not read, and says what to do', async (_, data) => {
  const { made, wait } = await output(data);
  await wait(700);
  expect([made.node.textContent, drawn.saved.mock.calls.length]).toEqual([t.noSnapshot, 0]);
});

test('a snapshot that cannot be read says what to do', async () => {
  drawn.saved.mockRejectedValue(new Error('<b>'));
  const { made, wait } = await output();
  await wait(700);
  expect(made.node.textContent).toBe(t.noSnapshot);
});

test('an output that is removed draws nothing, and asks no more', async () => {
  const { made, wait, lives } = await output({ data: 'packed' }, ['none']);
  made.dispose();
  await wait(100_000);
  expect([drawn.saved.mock.calls.length, lives.length]).toEqual([0, 1]);
});

test('an output that is removed takes its snapshot with it', async () => {
  const { made, wait } = await output();
  await wait(700);
  made.dispose();
  made.dispose();
  expect(drawn.undraw).toHaveBeenCalledOnce();
});

const model = (data: string, widget = 'a') => ({
  data: { [TYPE]: { data }, [LIVE]: { model_id: widget } },
});

test('an output that is rendered again, as when it is trusted, keeps what is drawn', async () => {
  const { made, wait } = await output();
  void made.renderModel(model('more'));
  await wait(700);
  const asked = drawn.saved.mock.calls.length;
  void made.renderModel(model('more'));
  await wait(100_000);
  expect([drawn.saved.mock.calls.length, drawn.undraw.mock.calls.length]).toEqual([asked, 0]);
  expect(made.node.textContent).toBe('snapshot more');
});

test('another output in its place is drawn once, and the first one is removed', async () => {
  const { made, wait } = await output();
  await wait(700);
  void made.renderModel(model('other'));
  void made.renderModel(model('last'));
  await wait(100_000);
  expect(drawn.undraw).toHaveBeenCalledOnce();
  expect(drawn.saved.mock.calls.map(([, text]) => text as string)).toEqual(['packed', 'last']);
  expect(made.node.textContent).toBe('snapshot last');
});

test('the widget of another output replaces the one that was shown', async () => {
  const { made, wait, lives } = await output({ data: 'packed' }, ['widget', 'widget']);
  await wait(5000);
  void made.renderModel(model('packed', 'b'));
  await wait(5000);
  expect(lives.map(({ dispose }) => vi.mocked(dispose).mock.calls.length)).toEqual([1, 0]);
  expect(lives[1]!.node.hidden).toBe(false);
});
