// @vitest-environment happy-dom
import { Widget } from '@lumino/widgets';
import { expect, test, vi } from 'vitest';
import { COMMANDS } from '../src/plugin/commands';
import plugin from '../src/plugin/index';
import { settled } from './fakes';
import { app, folder, run, t } from './jupyter';

vi.mock('@jupyterlab/ui-components', async () => (await import('./jupyter')).ui);
vi.mock('@jupyterlab/apputils', async () => (await import('./jupyter')).apputils);
vi.mock('@jupyterlab/application', () => ({ ILabShell: 'shell', ILayoutRestorer: 'restorer' }));
vi.mock('@jupyterlab/codemirror', () => ({ IEditorExtensionRegistry: 'editors' }));
vi.mock('@jupyterlab/coreutils', () => ({ PageConfig: { getOption: () => '' } }));
vi.mock('@jupyterlab/filebrowser', () => ({ IDefaultFileBrowser: '', IFileBrowserFactory: '' }));
vi.mock('@jupyterlab/launcher', () => ({ ILauncher: 'launcher' }));
vi.mock('@jupyterlab/rendermime', () => ({ IRenderMimeRegistry: 'rendermime' }));
vi.mock('@jupyterlab/settingregistry', () => ({ ISettingRegistry: 'settings' }));
vi.mock('@jupyterlab/translation', async () => {
  const { BUNDLE: bundle } = await import('./jupyter');
  return { ITranslator: 'translator', nullTranslator: { load: () => bundle } };
});

const desk = vi.hoisted(() => ({ used: [] as string[], asked: [] as object[], runs: {} }));
vi.mock('../src/plugin/desk', () => ({
  Desk: class {
    use = (kernel: string) => void desk.used.push(kernel);
    channel = () =>
      Promise.resolve({
        isOpen: true,
        dispose: () => undefined,
        ask: (op: string, args: object) => {
          desk.asked.push({ op, ...args });
          const page = { page: '<p>shown</p>', scripts: false };
          return Promise.resolve(op === 'runs' ? desk.runs : page);
        },
      });
  },
}));

interface Item {
  path: string;
  type: string;
}

/** Activate the extension in JupyterLab, or in Notebook 7, which has no such shell. */
async function activated(isLab = true) {
  document.head.replaceChildren();
  desk.used.length = desk.asked.length = 0;
  desk.runs = { folders: [folder(run('a'))] };
  const lab = app();
  let items: Item[] = [];
  const palette = { addItem: vi.fn() };
  const launcher = { add: vi.fn() };
  const restorer = { add: vi.fn(), restore: vi.fn(() => Promise.resolve()) };
  const composite = { runsFolder: 'runs', dumpOptions: '--tokens 0', kernel: 'torch' };
  const changed = { connect: vi.fn() };
  const registry = { load: () => Promise.resolve({ composite, changed }) };
  const browsers = { tracker: { currentWidget: { selectedItems: () => items.values() } } };
  const browser = { model: { path: 'work' } };
  const editors = { addExtension: vi.fn() };
  const rendermime = { addFactory: vi.fn() };
  const optional = [restorer, palette, launcher, null, registry, browsers, browser];
  const others = [...optional, editors, rendermime];
  await plugin.activate(lab as never, ...([isLab ? {} : null, ...others] as never[]));
  await settled();
  const panel = lab.shell.add.mock.calls.find(([, area]) => area === 'left')![0];
  const folders = (...paths: string[]) =>
    void (items = paths.map(path => ({ path, type: 'directory' })));
  const file = (path: string) => void (items = [{ path, type: 'file' }]);
  const openFolder = () => lab.commands.execute(COMMANDS.openFolder);
  const tabs = () => lab.shell.add.mock.calls.filter(([, area]) => area !== 'left');
  return {
    ...{ lab, palette, launcher, restorer, changed, composite, editors, rendermime },
    ...{ panel, folders, file, openFolder, tabs },
  };
}

test('the sidebar, the commands and the style are there, and the sidebar is restored', async () => {
  const { lab, panel, restorer, palette, launcher } = await activated();
  expect(Object.values(COMMANDS).every(id => lab.commands.hasCommand(id))).toBe(true);
  expect(restorer.add).toHaveBeenCalledWith(panel, panel.id);
  expect(document.head.querySelector('style')).not.toBeNull();
  const listed = palette.addItem.mock.calls.map(([item]) => (item as { command: string }).command);
  expect(listed.sort()).toEqual(
    Object.values(COMMANDS)
      .filter(id => id !== COMMANDS.openFolder) // it is about the file browser's selection
      .sort(),
  );
  expect(launcher.add).toHaveBeenCalledWith({ command: COMMANDS.show, category: t.other });
});

test('it works without any of the optional parts', async () => {
  const lab = app();
  const none = Array.from({ length: plugin.optional!.length }, () => null);
  await plugin.activate(lab as never, ...(none as never[]));
  expect(lab.commands.hasCommand(COMMANDS.show)).toBe(true);
});

test('the kernel of the settings is used, also after they change', async () => {
  const { changed, composite } = await activated();
  expect(desk.used).toEqual(['torch']);
  composite.kernel = 'other';
  (changed.connect.mock.calls[0]![0] as () => void)();
  expect(desk.used).toEqual(['torch', 'other']);
});

test('two folders of the file browser are compared, three are not', async () => {
  const { lab, folders, openFolder, tabs } = await activated();
  const label = () => [
    lab.commands.label(COMMANDS.openFolder),
    lab.commands.isEnabled(COMMANDS.openFolder),
  ];
  expect(label()).toEqual([t.openWith, false]);
  folders('a', 'b', 'c');
  expect(label()).toEqual([t.openWith, false]);
  folders('a', 'b');
  expect(label()).toEqual([t.compareWith, true]);
  await openFolder();
  await settled();
  expect(tabs().map(([, area]) => area)).toEqual(['main']);
  expect(desk.asked.at(-1)).toEqual({ op: 'open', golden: 'a', mine: 'b' });
});

test('the same runs are shown in one tab, whoever opens them', async () => {
  const { lab, tabs } = await activated();
  await lab.commands.execute(COMMANDS.open, { golden: 'a', mine: 'b' });
  await lab.commands.execute(COMMANDS.open, { golden: 'a', mine: 'b' });
  await lab.commands.execute(COMMANDS.open, { golden: 'b', mine: 'a' });
  expect(tabs().length).toBe(2);
  const [first] = tabs()[0]!;
  expect(lab.shell.activateById.mock.calls.slice(0, 2)).toEqual([[first.id], [first.id]]);
});

test('a folder that holds runs lists them in the sidebar; another one is opened', async () => {
  const { lab, panel, folders, openFolder, tabs } = await activated();
  folders('runs');
  await openFolder();
  expect(lab.shell.activateById).toHaveBeenLastCalledWith(panel.id);
  expect(tabs()).toEqual([]);
  desk.runs = { folders: [] };
  folders('runs/a');
  await openFolder();
  await settled();
  expect(desk.asked.at(-1)).toEqual({ op: 'open', golden: 'runs/a', mine: '' });
});

test('a folder that cannot be listed is opened, and its tab says why it cannot be', async () => {
  const { folders, openFolder, tabs } = await activated();
  desk.runs = Promise.reject(new Error('no access'));
  folders('secret');
  await openFolder();
  expect(tabs().length).toBe(1);
});

test('a file is opened as a report, without looking for runs in it', async () => {
  const { file, openFolder, tabs } = await activated();
  file('report.html');
  await openFolder();
  await settled();
  expect([tabs().length, desk.asked]).toEqual([
    1,
    [{ op: 'open', golden: 'report.html', mine: '' }],
  ]);
});

test('in Notebook 7 tabs open below, as the main area holds one widget', async () => {
  const { lab, tabs } = await activated(false);
  await lab.commands.execute(COMMANDS.open, { golden: 'a' });
  expect(tabs().map(([, area]) => area)).toEqual(['down']);
});

test('runs are looked for in the folders of the browser and of open documents', async () => {
  const { lab, panel } = await activated();
  const notebook = new Widget();
  Object.assign(notebook, { context: { path: 'far/x.ipynb' } });
  lab.shell.add(notebook, 'main');
  Widget.attach(panel, document.body);
  await settled();
  expect(desk.asked.at(-1)).toEqual({ op: 'runs', folders: ['', 'work', 'far'], name: 'runs' });
});

test('without a notebook no cell can be recorded', async () => {
  const { lab } = await activated();
  expect(lab.commands.isEnabled(COMMANDS.recordCell)).toBe(false);
  expect(lab.commands.isToggled(COMMANDS.recordCell)).toBe(false);
  await lab.commands.execute(COMMANDS.recordCell);
});

test('outputs of saved notebooks and the help of magics are registered', async () => {
  const { rendermime, editors } = await activated();
  expect(rendermime.addFactory.mock.calls[0]![0]).toMatchObject({
    mimeTypes: ['application/vnd.llmdebug.explorer+json'],
  });
  expect(editors.addExtension).toHaveBeenCalledOnce();
});
