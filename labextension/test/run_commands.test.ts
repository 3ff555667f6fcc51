// @vitest-environment happy-dom
import type { JupyterFrontEnd } from '@jupyterlab/application';
import { beforeEach, expect, test, vi } from 'vitest';
import { COMMANDS } from '../src/plugin/commands';
import { addRunCommands } from '../src/plugin/run_commands';
import type { RunRow } from '../src/plugin/wire';
import { app, apputils, run, t } from './jupyter';

vi.mock('@jupyterlab/ui-components', async () => (await import('./jupyter')).ui);
vi.mock('@jupyterlab/apputils', async () => (await import('./jupyter')).apputils);

beforeEach(() => void apputils.showDialog.mockClear());

function commands(...selection: RunRow[]) {
  const lab = app();
  const panel = { id: 'panel', selection, swap: vi.fn(), delete: vi.fn() };
  const browser = { id: 'files', model: { cd: vi.fn() }, selectItemByName: vi.fn() };
  const open = vi.fn();
  const add = (files: typeof browser | null) =>
    addRunCommands(lab as unknown as JupyterFrontEnd, panel as never, files as never, open, t);
  add(browser);
  const can = () =>
    Object.entries(COMMANDS)
      .filter(([, id]) => lab.commands.hasCommand(id) && lab.commands.isEnabled(id))
      .map(([name]) => name);
  const execute = (name: keyof typeof COMMANDS, args = {}) =>
    lab.commands.execute(COMMANDS[name], args);
  return { lab, panel, browser, open, can, execute };
}
const report = run('r', { kind: 'report' });

test.each([
  ['nothing', [], ['show']],
  ['a run', [run('a')], ['show', 'open', 'reveal', 'delete']],
  ['a run elsewhere', [run('a', { place: '' })], ['show', 'open', 'delete']],
  ['two runs', [run('a'), run('b')], ['show', 'compare', 'swap', 'delete']],
  ['a run and a report', [run('a'), report], ['show', 'delete']],
  ['three runs', [run('a'), run('b'), run('c')], ['show', 'delete']],
])('with %s selected, what makes sense can be done', (_, selection, names) => {
  expect(commands(...selection).can()).toEqual(names);
});

test('a run is opened; two are compared, the first one as golden', async () => {
  const one = commands(run('a'));
  await one.execute('open');
  expect(one.open.mock.calls).toEqual([[{ golden: 'a', mine: '' }]]);
  const two = commands(run('b'), run('a'));
  await two.execute('compare');
  expect(two.open.mock.calls).toEqual([[{ golden: 'b', mine: 'a' }]]);
  await two.execute('swap');
  expect(two.panel.swap).toHaveBeenCalledOnce();
});

test('a tab of before is opened again by its paths, whatever is selected', async () => {
  const { lab, open, execute } = commands();
  expect(lab.commands.isEnabled(COMMANDS.open, { golden: 'x', mine: 'y' })).toBe(true);
  await execute('open', { golden: 'x', mine: 'y' });
  await execute('open', { golden: 'x' });
  expect(open.mock.calls).toEqual([[{ golden: 'x', mine: 'y' }], [{ golden: 'x', mine: '' }]]);
});

test('the sidebar is shown', async () => {
  const { lab, execute } = commands();
  await execute('show');
  expect(lab.shell.activateById.mock.calls).toEqual([['panel']]);
});

test('a run is revealed in its folder of the file browser', async () => {
  const { lab, browser, execute } = commands(run('a', { place: 'mine/runs/a' }));
  await execute('reveal');
  expect(browser.model.cd.mock.calls).toEqual([['/mine/runs']]);
  expect(lab.shell.activateById.mock.calls).toEqual([['files']]);
  expect(browser.selectItemByName.mock.calls).toEqual([['a']]);
});

test('runs are deleted after a question that names them, in which no is at hand', async () => {
  const runs = [run('a'), run('b')];
  const { panel, execute } = commands(...runs);
  await execute('delete');
  expect(apputils.showDialog.mock.calls[0]![0]).toMatchObject({
    body: 'This permanently deletes from disk: a, b',
    defaultButton: 0,
    buttons: [{ label: t.cancel }, { label: t.delete }],
  });
  expect(panel.delete.mock.calls).toEqual([[runs]]);
});

test('without a yes nothing is deleted, and without a selection nothing is asked', async () => {
  apputils.showDialog.mockResolvedValueOnce({ button: { accept: false } });
  const { panel, execute } = commands(run('a'));
  await execute('delete');
  await commands().execute('delete');
  expect([panel.delete.mock.calls.length, apputils.showDialog.mock.calls.length]).toEqual([0, 1]);
});

test('the runs that the question named are deleted, whatever is selected by then', async () => {
  const { panel, execute } = commands(run('a'));
  apputils.showDialog.mockImplementationOnce(() => {
    panel.selection = [run('precious')];
    return Promise.resolve({ button: { accept: true } });
  });
  await execute('delete');
  expect(panel.delete.mock.calls).toEqual([[[run('a')]]]);
});
