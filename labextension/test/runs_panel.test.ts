// @vitest-environment happy-dom
import { CommandRegistry } from '@lumino/commands';
import { Widget } from '@lumino/widgets';
import { afterEach, expect, test, vi } from 'vitest';
import { COMMANDS } from '../src/plugin/commands';
import type { Desk } from '../src/plugin/desk';
import { RunsPanel } from '../src/plugin/runs_panel';
import type { RunsFolder } from '../src/plugin/wire';
import { named, press, settled, texts } from './fakes';
import { folder, later, run, t } from './jupyter';

vi.mock('@jupyterlab/ui-components', async () => (await import('./jupyter')).ui);

afterEach(() => void vi.useRealTimers());

type Asked = { folders?: string[]; path?: string };

function panel(answer: (args: Asked, op: string) => unknown = () => [folder(run('a'), run('b'))]) {
  const asked: [string, Asked][] = [];
  const channel = {
    isOpen: true,
    ask: async (op: string, args: Asked) => {
      asked.push([op, args]);
      return { folders: (await answer(args, op)) as RunsFolder[] };
    },
  };
  const places = { folders: ['', 'work'], name: 'runs' };
  const commands = new CommandRegistry();
  const done = vi.fn();
  const desk = { channel: () => Promise.resolve(channel) } as unknown as Desk;
  const made = new RunsPanel(desk, commands, () => places, t);
  const enabled = () => made.selection.length === 2;
  for (const id of Object.values(COMMANDS))
    commands.addCommand(id, { execute: () => done(id) as unknown, isEnabled: enabled });
  Widget.attach(made, document.body);
  const shown = () => texts(made.node, '.jp-llmdebug-name');
  const note = () => made.node.querySelector<HTMLElement>('.jp-llmdebug-note')!;
  const line = () => made.node.querySelector('[role=status]')!.textContent;
  const click = (path: string, more: MouseEventInit = {}) =>
    made.node
      .querySelector(`[data-path='${path}']`)!
      .dispatchEvent(new MouseEvent('click', { bubbles: true, ...more }));
  return { made, asked, places, done, shown, note, line, click };
}

test('the runs of the workspace are listed, and what they are is said', async () => {
  const { made, asked, shown, note } = panel();
  expect(note().textContent).toBe(t.loading);
  await settled();
  expect(asked).toEqual([['runs', { folders: ['', 'work'], name: 'runs' }]]);
  expect([shown(), note().hidden]).toEqual([['a', 'b'], true]);
  expect([made.node.getAttribute('role'), made.node.getAttribute('aria-label')]).toEqual([
    'region',
    t.panel,
  ]);
});

test('a workspace without runs says how to record one', async () => {
  const { note } = panel(() => []);
  await settled();
  expect([note().hidden, note().textContent]).toEqual([false, t.noRuns]);
});

test('a search that finds nothing says so, with its words as text', async () => {
  const { made, shown, note } = panel();
  await settled();
  const search = made.node.querySelector<HTMLInputElement>('[type=search]')!;
  const type = (words: string) => {
    search.value = words;
    search.dispatchEvent(new Event('input'));
  };
  type('<b>');
  expect([note().textContent, note().querySelector('b')]).toEqual([t.nothingFound('<b>'), null]);
  type('B');
  expect([shown(), search.getAttribute('aria-label')]).toEqual([['b'], t.search]);
});

test('a failure says why, and trying again may succeed', async () => {
  let broken = true;
  const { note, shown } = panel(() => {
    if (broken) throw new Error('no <kernel>');
    return [folder(run('a'))];
  });
  await settled();
  expect([note().getAttribute('role'), note().firstChild!.textContent]).toEqual([
    'alert',
    'Failed: no <kernel>',
  ]);
  broken = false;
  named(note(), t.retry).click();
  expect(note().textContent).toBe(t.loading);
  await settled();
  expect([shown(), note().hidden]).toEqual([['a'], true]);
});

test('buttons can be pressed as far as their commands can run; a line says on what', async () => {
  const { made, click, line, done } = panel();
  await settled();
  expect(named(made.node, t.compare).disabled).toBe(true);
  click('b');
  expect(line()).toBe('1 selected');
  click('a', { ctrlKey: true });
  expect([line(), named(made.node, t.compare).disabled]).toEqual(['Golden: b. Mine: a.', false]);
  made.swap();
  expect(line()).toBe('Golden: a. Mine: b.');
  named(made.node, t.compare).click();
  press(made.node.querySelector('[role=listbox]')!, 'Enter');
  press(made.node.querySelector('[role=listbox]')!, 'Delete');
  expect(done.mock.calls.flat()).toEqual([COMMANDS.compare, COMMANDS.compare, COMMANDS.delete]);
});

test('what is recording is looked at every second, the rest every four', async () => {
  vi.useFakeTimers();
  const state = { now: 'recording' as 'recording' | 'complete', bytes: 1000 };
  const { asked, made } = panel(() => [folder(run('a', { state: state.now, bytes: state.bytes }))]);
  await vi.advanceTimersByTimeAsync(1);
  state.bytes = 3000;
  await vi.advanceTimersByTimeAsync(1000);
  expect(asked.length).toBe(2);
  expect(made.node.textContent).toContain('2.0 kB/s');
  state.now = 'complete';
  await vi.advanceTimersByTimeAsync(1000);
  await vi.advanceTimersByTimeAsync(3000);
  expect(asked.length).toBe(3);
  await vi.advanceTimersByTimeAsync(1000);
  expect(asked.length).toBe(4);
});

test('while it is hidden, or gone, nothing is asked', async () => {
  vi.useFakeTimers();
  const { asked, made } = panel();
  await vi.advanceTimersByTimeAsync(1);
  made.hide();
  await vi.advanceTimersByTimeAsync(60_000);
  expect(asked.length).toBe(1);
  made.show();
  await vi.advanceTimersByTimeAsync(1);
  expect(asked.length).toBe(2);
  made.dispose();
  await vi.advanceTimersByTimeAsync(60_000);
  expect(asked.length).toBe(2);
});

test('runs are deleted one by one, then the list is read again; an error is said', async () => {
  const { made, asked, line } = panel((args, op) => {
    if (args.path === 'b') throw new Error('in use');
    return op === 'runs' ? [folder(run('b'))] : [];
  });
  await settled();
  await made.delete([run('a'), run('b'), run('c')]);
  expect(asked.slice(1).map(([op, args]) => args.path ?? op)).toEqual(['a', 'b', 'runs']);
  expect(line()).toBe('Failed: in use');
});

test('a folder that holds runs is listed with them, and its newest run is selected', async () => {
  const { made, asked, shown } = panel(({ folders }) =>
    folders!.includes('far') ? [folder(run('far/x'))] : [],
  );
  await settled();
  expect(await made.listFolder('far')).toBe(true);
  expect([shown(), made.selection.map(one => one.path)]).toEqual([['far/x'], ['far/x']]);
  await made.refresh();
  expect(asked.at(-1)![1].folders).toEqual(['', 'work', 'far']);
});

test('a folder without runs is none', async () => {
  const { made } = panel(() => []);
  await settled();
  expect(await made.listFolder('empty')).toBe(false);
});

test('a list asked for before a folder was opened does not take its run away', async () => {
  const slow = later<RunsFolder[]>();
  const { made, shown, places } = panel(({ folders }) => {
    if (folders!.includes('far')) return [folder(run('far/x'))];
    return places.name === 'slow' ? slow.promise : [folder(run('a'))];
  });
  await settled();
  places.name = 'slow';
  const refreshed = made.refresh();
  await made.listFolder('far');
  slow.resolve([folder(run('a'))]);
  await refreshed;
  expect(shown()).toContain('far/x');
  expect(made.selection.map(one => one.path)).toEqual(['far/x']);
});

test('settings that change while a list is on its way are asked for at once', async () => {
  const slow = later<RunsFolder[]>();
  const { made, asked, shown, places, note } = panel(() =>
    places.name === 'runs' ? slow.promise : [folder(run('new'))],
  );
  await settled();
  places.name = 'other';
  void made.refresh();
  slow.reject(new Error('the kernel of before was shut down'));
  await settled();
  expect([asked.length, shown(), note().hidden]).toEqual([2, ['new'], true]);
});

test('the panel takes the focus where there is something to do', async () => {
  const { made } = panel();
  await settled();
  made.activate();
  await settled();
  expect(document.activeElement!.getAttribute('role')).toBe('listbox');
});
