/** Opens a line of the program for an explorer: a file in the editor, or a cell of the notebook. */
import type { JupyterFrontEnd } from '@jupyterlab/application';
import { PageConfig } from '@jupyterlab/coreutils';
import type { Widget } from '@lumino/widgets';
import { parentOf } from './paths';
import type { Strings } from './strings';

/** The name of the event that an explorer fires, with its `detail`. */
const EVENT = 'llmdebug:open-line';
interface Place {
  file: string;
  /** From 1. */
  line: number;
  say: (text: string) => void;
}

interface Editor {
  setCursorPosition(position: { line: number; column: number }): void;
  revealPosition(position: { line: number; column: number }): void;
  focus(): void;
}
interface Cell {
  model: { executionCount?: number | null };
  editor: Editor | null;
}
/** The parts of a document's widget, or of a notebook, that we use. */
interface Document extends Widget {
  context?: { path?: string; ready?: Promise<void> };
  revealed?: Promise<void>;
  content: {
    editor?: Editor;
    widgets?: readonly Cell[];
    activeCellIndex?: number;
    mode?: string;
    scrollToItem?: (index: number) => Promise<void>;
  };
}

/** Listen to the explorers of the page. */
export function openLines(app: JupyterFrontEnd, t: Strings): void {
  document.addEventListener(EVENT, event => {
    event.preventDefault();
    const { detail, target } = event as CustomEvent<Place>;
    const notebook = [...app.shell.widgets('main')].find(widget =>
      widget.node.contains(target as Node),
    ) as Document | undefined;
    const cell = /^cell (\d+)$/.exec(detail.file);
    const opened = cell
      ? openCell(app, notebook, Number(cell[1]), detail.line)
      : openFile(app, notebook, detail);
    void opened.then(found => {
      if (!found) detail.say(t.notOpened(`${detail.file}:${detail.line}`));
    });
  });
}

async function openCell(
  { shell }: JupyterFrontEnd,
  notebook: Document | undefined,
  count: number,
  line: number,
): Promise<boolean> {
  const documents = [notebook, ...(shell.widgets('main') as Iterable<Document>)];
  for (const one of documents) {
    const at = one?.content?.widgets?.findIndex(cell => cell.model?.executionCount === count) ?? -1;
    if (!one || at < 0) continue;
    shell.activateById(one.id);
    one.content.activeCellIndex = at;
    await one.content.scrollToItem?.(at);
    one.content.mode = 'edit';
    show(one.content.widgets![at]!.editor, line);
    return true;
  }
  return false;
}

async function openFile(
  { commands, serviceManager }: JupyterFrontEnd,
  notebook: Document | undefined,
  { file, line }: Place,
): Promise<boolean> {
  for (const path of candidates(file, parentOf(notebook?.context?.path ?? '')))
    try {
      await serviceManager.contents.get(path, { content: false });
      const opened = (await commands.execute('docmanager:open', { path, factory: 'Editor' })) as
        Document | undefined;
      await opened?.context?.ready;
      await opened?.revealed;
      show(opened?.content.editor ?? null, line);
      return opened !== undefined;
    } catch {
      // not there: the next one
    }
  return false;
}

/** Return where Jupyter may serve a file: beside the notebook, in the root, by its whole path. */
function candidates(file: string, folder: string): string[] {
  const root = PageConfig.getOption('serverRoot').replace(/\/$/, '');
  if (file.startsWith('/'))
    return root && file.startsWith(`${root}/`) ? [file.slice(root.length + 1)] : [];
  if (/^(~|\.\.)/.test(file)) return [];
  return [...new Set([folder ? `${folder}/${file}` : file, file])];
}

function show(editor: Editor | null, line: number): void {
  const position = { line: line - 1, column: 0 };
  editor?.setCursorPosition(position);
  editor?.revealPosition(position);
  editor?.focus();
}
