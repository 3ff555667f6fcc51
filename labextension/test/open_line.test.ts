// @vitest-environment happy-dom
import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Widget } from '@lumino/widgets';
import { beforeEach, expect, test, vi } from 'vitest';
import { openLines } from '../src/plugin/open_line';
import { settled } from './fakes';
import { app, t } from './jupyter';

const config = vi.hoisted(() => ({ root: '/home/user/' }));
vi.mock('@jupyterlab/coreutils', () => ({ PageConfig: { getOption: () => config.root } }));

const lab = app();
const files = new Set<string>();
const editor = () => ({ setCursorPosition: vi.fn(), revealPosition: vi.fn(), focus: vi.fn() });
let opened = editor();
const execute = vi.fn();
Object.assign(lab.serviceManager, {
  contents: {
    get: (path: string) =>
      files.has(path) ? Promise.resolve({}) : Promise.reject(new Error('404')),
  },
});
lab.commands.addCommand('docmanager:open', {
  execute: args => {
    execute(args);
    return { content: { editor: opened } };
  },
});
openLines(lab as unknown as JupyterFrontEnd, t);

/** A notebook in a folder, whose cells have these execution counts. */
function notebook(path: string, ...counts: (number | null)[]) {
  const made = new Widget();
  const cells = counts.map(executionCount => ({ model: { executionCount }, editor: editor() }));
  const content = { widgets: cells, activeCellIndex: -1, mode: 'command', scrollToItem: vi.fn() };
  Object.assign(made, { id: path, context: { path }, content });
  document.body.append(made.node);
  lab.shell.add(made, 'main');
  return { made, cells, content };
}

beforeEach(() => {
  files.clear();
  execute.mockClear();
  lab.shell.activateById.mockClear();
  opened = editor();
});

async function open(from: Element, file: string, line: number) {
  const say = vi.fn();
  const detail = { file, line, say };
  const init = { bubbles: true, composed: true, cancelable: true, detail };
  const event = new CustomEvent('llmdebug:open-line', init);
  from.dispatchEvent(event);
  await settled();
  expect(event.defaultPrevented).toBe(true); // else the explorer copies the place
  return say;
}
const here = notebook('work/here.ipynb', 1, 7);
const other = notebook('other.ipynb', 7, 9);

test('a file beside the notebook is opened in the editor, at its line', async () => {
  files.add('work/port.py').add('port.py');
  const say = await open(here.made.node, 'port.py', 30);
  expect(execute.mock.calls).toEqual([[{ path: 'work/port.py', factory: 'Editor' }]]);
  expect(opened.setCursorPosition).toHaveBeenCalledWith({ line: 29, column: 0 });
  expect(opened.focus).toHaveBeenCalledOnce();
  expect(say).not.toHaveBeenCalled();
});

test('a file that is not beside the notebook is looked for in the root', async () => {
  files.add('lib/port.py');
  await open(here.made.node, 'lib/port.py', 1);
  expect(execute.mock.calls).toEqual([[{ path: 'lib/port.py', factory: 'Editor' }]]);
});

test('a whole path is opened below the root that Jupyter serves', async () => {
  files.add('lib/port.py');
  await open(here.made.node, '/home/user/lib/port.py', 1);
  expect(execute.mock.calls).toEqual([[{ path: 'lib/port.py', factory: 'Editor' }]]);
});

test.each(['/etc/passwd', '/home/username/x.py', '~/x.py', '../x.py', 'missing.py'])(
  '%s is not in the workspace, and that is said',
  async file => {
    files.add('etc/passwd').add('x.py').add('name/x.py').add('../x.py').add('~/x.py');
    const say = await open(here.made.node, file, 3);
    expect(say.mock.calls).toEqual([[t.notOpened(`${file}:3`)]]);
    expect(execute).not.toHaveBeenCalled();
  },
);

test('a cell is opened in the notebook of the explorer first', async () => {
  const say = await open(here.made.node, 'cell 7', 2);
  expect(lab.shell.activateById.mock.calls).toEqual([['work/here.ipynb']]);
  expect([here.content.activeCellIndex, here.content.mode]).toEqual([1, 'edit']);
  expect(here.content.scrollToItem).toHaveBeenCalledWith(1);
  expect(here.cells[1]!.editor.setCursorPosition).toHaveBeenCalledWith({ line: 1, column: 0 });
  expect(say).not.toHaveBeenCalled();
});

test('a cell that another notebook has run is opened there', async () => {
  await open(here.made.node, 'cell 9', 1);
  expect(lab.shell.activateById.mock.calls).toEqual([['other.ipynb']]);
  expect(other.content.activeCellIndex).toBe(1);
});

test('a cell that no notebook has is said', async () => {
  const say = await open(document.body, 'cell 99', 1);
  expect(say.mock.calls).toEqual([[t.notOpened('cell 99:1')]]);
});
