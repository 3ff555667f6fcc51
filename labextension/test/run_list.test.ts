// @vitest-environment happy-dom
import { expect, test, vi } from 'vitest';
import { RunList, size } from '../src/plugin/run_list';
import type { Strings } from '../src/plugin/strings';
import type { RunRow, RunsFolder } from '../src/plugin/wire';

const TEXTS = {
  list: 'Runs',
  recording: 'recording',
  incomplete: 'incomplete',
  reports: (folder: string) => `Reports in ${folder}`,
  steps: (n: number) => `${n} steps`,
  tensors: (n: number) => `${n} tensors`,
  rate: (text: string) => `${text}/s`,
  verdict: (golden: string, verdict: string) => `against ${golden}: ${verdict}`,
} as unknown as Strings;

const run = (path: string, more: Partial<RunRow> = {}): RunRow => ({
  ...{ kind: 'run', name: path, path, place: path, created: 0, bytes: 1000 },
  ...{ records: 4, steps: 2, state: 'complete', problem: '' },
  ...{ model: '', verdict: '', against: '' },
  ...more,
});
const folder = (...runs: RunRow[]): RunsFolder => ({ kind: 'run', folder: 'runs', runs });

function list(...folders: RunsFolder[]) {
  const on = { selected: vi.fn(), open: vi.fn(), delete: vi.fn() };
  const made = new RunList(TEXTS, on);
  document.body.replaceChildren(made.root);
  made.show(folders, new Map());
  const press = (key: string, more: KeyboardEventInit = {}) =>
    made.root.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, ...more }));
  const click = (path: string, more: MouseEventInit = {}) =>
    made.root
      .querySelector(`[data-path=${path}]`)!
      .dispatchEvent(new MouseEvent('click', { bubbles: true, ...more }));
  const paths = () => made.selection.map(one => one.path);
  return { made, on, press, click, paths };
}

test('runs are selected in the order of the clicks, whatever their place in the list', () => {
  const { click, paths } = list(folder(run('a'), run('b'), run('c')));
  click('c');
  click('a', { ctrlKey: true });
  expect(paths()).toEqual(['c', 'a']);
  click('c', { ctrlKey: true });
  click('c', { shiftKey: true });
  expect(paths()).toEqual(['a', 'c']);
  click('b');
  expect(paths()).toEqual(['b']);
});

test('the keyboard moves, extends and toggles the selection', () => {
  const { press, paths } = list(folder(run('a'), run('b'), run('c')));
  press('ArrowDown');
  press('ArrowDown');
  expect(paths()).toEqual(['b']);
  press('ArrowDown', { shiftKey: true });
  expect(paths()).toEqual(['b', 'c']);
  press('Home', { ctrlKey: true });
  expect(paths()).toEqual(['b', 'c']);
  press(' ');
  expect(paths()).toEqual(['b', 'c', 'a']);
  press('a', { ctrlKey: true });
  expect(paths()).toEqual(['a', 'b', 'c']);
});

test('Enter opens and Delete deletes the selection', () => {
  const { press, on } = list(folder(run('a')));
  press('Enter');
  press('Delete');
  expect([on.open.mock.calls.length, on.delete.mock.calls.length]).toEqual([1, 1]);
});

test('a refresh keeps the selection, except for runs that are gone', () => {
  const { made, click, paths, on } = list(folder(run('a'), run('b')));
  click('b');
  click('a', { ctrlKey: true });
  on.selected.mockClear();
  made.show([folder(run('new'), run('a'), run('b'))], new Map());
  expect([paths(), on.selected.mock.calls.length]).toEqual([['b', 'a'], 0]);
  made.show([folder(run('a'))], new Map());
  expect([paths(), on.selected.mock.calls.length]).toEqual([['a'], 1]);
});

test('folders have titles only if there are several, and reports say so', () => {
  expect(list(folder(run('a'))).made.root.textContent).not.toContain('runs');
  const reports: RunsFolder = { kind: 'report', folder: '/', runs: [run('r')] };
  const titles = [...list(folder(run('a')), reports).made.root.querySelectorAll('[role=group]')];
  expect(titles.map(title => title.firstElementChild?.textContent)).toEqual([
    'runs',
    'Reports in /',
  ]);
});

test('a run says its steps, tensors and size; a live one also its speed', () => {
  const { made } = list(folder(run('a')));
  expect(made.root.textContent).toBe('a2 steps · 4 tensors · 1.0 kB');
  const live = run('a', { state: 'recording', steps: null, records: null });
  made.show([folder(live)], new Map([['a', 2000]]));
  expect(made.root.textContent).toBe('arecording · 2.0 kB/s1.0 kB');
});

test('names are shown as text, not as markup', () => {
  const { made } = list(folder(run('a', { name: '<img src=x>' })));
  expect(made.root.querySelector('img')).toBeNull();
  expect(made.root.textContent).toContain('<img src=x>');
});

test('a search shows the rows with all its words in name or model, and keeps the selection', () => {
  const folders = [
    folder(run('golden', { model: 'LlamaForCausalLM' }), run('my_port')),
    folder(run('other')),
  ];
  const { made, click, paths, press } = list(...folders);
  const shown = () => [...made.root.querySelectorAll('.jp-llmdebug-name')].map(e => e.textContent);
  click('golden');
  made.show(folders, new Map(), 'PORT my');
  expect([shown(), paths()]).toEqual([['my_port'], ['golden']]);
  click('my_port', { ctrlKey: true });
  expect(paths()).toEqual(['golden', 'my_port']);
  made.show(folders, new Map(), 'llama');
  expect(shown()).toEqual(['golden']);
  press('End');
  expect(paths()).toEqual(['golden']);
  made.show(folders, new Map(), 'nothing');
  expect(made.root.childElementCount).toBe(0);
});

test('golden and mine are swapped', () => {
  const { made, click, paths, on } = list(folder(run('a'), run('b')));
  click('b');
  click('a', { ctrlKey: true });
  on.selected.mockClear();
  made.swap();
  expect([paths(), on.selected.mock.calls.length]).toEqual([['a', 'b'], 1]);
});

test('a row says its model and the verdict of its last comparison', () => {
  const row = run('mine', { model: 'Qwen2', verdict: 'within_noise', against: 'golden' });
  const { made } = list(folder(row));
  expect(made.root.textContent).toContain('against golden: within noise');
  expect(made.root.textContent).toContain('Qwen2 · ');
});

test.each([
  [0, '0 B'],
  [999, '999 B'],
  [1000, '1.0 kB'],
  [2_500_000, '2.5 MB'],
  [3.2e15, '3200.0 TB'],
])('%i bytes are shown as %s', (bytes, text) => {
  expect(size(bytes)).toBe(text);
});
