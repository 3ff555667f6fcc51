// @vitest-environment happy-dom
import { afterEach, expect, test, vi } from 'vitest';
import type { Desk } from '../src/plugin/desk';
import { ExplorerTab, type Shown } from '../src/plugin/explorer_tab';
import type { Opened } from '../src/plugin/wire';
import { named, settled } from './fakes';
import { later, t } from './jupyter';

vi.mock('@jupyterlab/ui-components', async () => (await import('./jupyter')).ui);

afterEach(() => void vi.restoreAllMocks());

const BOTH: Shown = { golden: '/runs/<b>golden', mine: '/runs/mine' };
const page = (more: Partial<Opened> = {}): Opened => ({
  ...{ title: '', code: '', traits: {}, page: '', scripts: false },
  ...more,
});
/** An explorer that says which trait it was given, and when it is removed. */
const CODE = `export default { render: ({ model, el }) => {
  el.textContent = 'explorer of ' + model.get('snapshot');
  return () => { globalThis.removed = (globalThis.removed ?? 0) + 1; };
} };`;

function tab(answers: (Opened | Error | Promise<Opened>)[], shown = BOTH) {
  const asked: object[] = [];
  const dispose = vi.fn();
  const channel = {
    dispose,
    ask: async (op: string, args: object) => {
      asked.push({ op, ...args });
      const answer = await answers.shift()!;
      if (answer instanceof Error) throw answer;
      return answer;
    },
  };
  const ready = later<void>();
  const channels = vi.fn(async () => {
    await ready.promise;
    return channel;
  });
  // a module of its own for each test, as a browser has for each blob
  vi.spyOn(URL, 'createObjectURL').mockReturnValue(
    `data:text/javascript,${encodeURIComponent(CODE)}`,
  );
  const made = new ExplorerTab(shown, { channel: channels } as unknown as Desk, t);
  document.body.replaceChildren(made.node);
  return { made, asked, dispose, ready, channels };
}

test('its title names both runs, and it says that they are compared', () => {
  const { made } = tab([page()]);
  expect([made.title.label, made.title.closable]).toEqual(['<b>golden and mine', true]);
  expect(made.title.caption).toBe('/runs/<b>golden\n/runs/mine');
  const line = made.node.querySelector('[role=status]')!;
  expect([line.textContent, line.querySelector('b')]).toEqual([
    'Comparing <b>golden and mine…',
    null,
  ]);
  expect(tab([page()], { golden: 'a', mine: '' }).made.node.textContent).toBe('Opening a…');
});

test('the explorer that the kernel sends is drawn, and removed with the tab', async () => {
  const { made, asked, dispose, ready } = tab([page({ code: CODE, traits: { snapshot: 'it' } })]);
  ready.resolve();
  await vi.waitFor(() => expect(made.node.textContent).toBe('explorer of it'));
  expect(asked).toEqual([{ op: 'open', ...BOTH }]);
  made.dispose();
  expect([(globalThis as { removed?: number }).removed, dispose.mock.calls.length]).toEqual([1, 1]);
});

test.each([
  [true, 'allow-scripts'],
  [false, ''],
])('the page of a report is shown in a frame of its own, scripts: %s', async (scripts, sandbox) => {
  const { made, ready } = tab([page({ page: '<p>report</p>', scripts })]);
  ready.resolve();
  await vi.waitFor(() => expect(made.node.querySelector('iframe')).not.toBeNull());
  const frame = made.node.querySelector('iframe')!;
  expect([frame.getAttribute('sandbox'), frame.title]).toEqual([sandbox, '<b>golden and mine']);
  expect(frame.getAttribute('srcdoc') ?? frame.srcdoc).toBe('<p>report</p>');
});

test('a failure says why, as text, and can be tried again', async () => {
  const { made, dispose, ready } = tab([new Error('no <run>'), page({ page: 'report' })]);
  ready.resolve();
  await vi.waitFor(() => expect(made.node.querySelector('[role=alert]')).not.toBeNull());
  expect(made.node.querySelector('p')!.textContent).toBe('Failed: no <run>');
  expect(dispose).toHaveBeenCalledOnce();
  named(made.node, t.retry).click();
  await vi.waitFor(() => expect(made.node.querySelector('iframe')).not.toBeNull());
});

test('a tab closed before its channel opens asks nothing, and closes the channel', async () => {
  const { made, asked, dispose, ready } = tab([page()]);
  made.dispose();
  ready.resolve();
  await settled();
  expect([asked, dispose.mock.calls.length]).toEqual([[], 1]);
});

test('a tab that is closed while runs are compared shows neither them nor an error', async () => {
  const slow = later<Opened>();
  const { made, dispose, ready } = tab([slow.promise]);
  ready.resolve();
  await settled();
  made.dispose();
  slow.reject(new Error('gone'));
  await settled();
  expect([dispose.mock.calls.length, made.node.querySelector('[role=alert]')]).toEqual([1, null]);
});
