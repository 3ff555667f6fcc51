/** Puts `%%llmdump` on top of a notebook's active cell, or takes it off again. */
import type { ISessionContext } from '@jupyterlab/apputils';
import type { Widget } from '@lumino/widgets';

const MAGIC = /^\s*%%llmdump\b[^\n]*\n?/;
const LOAD = '%load_ext llmdebug_nb';

interface Signal {
  connect(slot: () => void): boolean;
}

/** The part of a NotebookPanel that is needed: its package would bring a hundred others for its types. */
interface Notebook extends Widget {
  sessionContext: ISessionContext;
  content: {
    activeCell: {
      model: {
        type: string;
        contentChanged: Signal;
        sharedModel: { getSource(): string; setSource(source: string): void };
      };
    } | null;
    activeCellChanged: Signal;
    activeCellIndex: number;
    model: {
      sharedModel: {
        cells: readonly { getSource(): string }[];
        insertCell(index: number, cell: { cell_type: string; source: string }): unknown;
      };
    } | null;
  };
}

export function codeNotebook(widget: Widget | null): Notebook | null {
  const notebook = widget as Notebook | null;
  return notebook?.content?.activeCell?.model.type === 'code' && notebook.content.model
    ? notebook
    : null;
}

export function isRecording(widget: Widget | null): boolean {
  return MAGIC.test(codeNotebook(widget)?.content.activeCell?.model.sharedModel.getSource() ?? '');
}

/** Call `changed` whenever the active cell of a notebook is another one, or reads otherwise. The same function is not called twice. */
export function followCell(widget: Widget | null, changed: () => void): void {
  const content = (widget as Notebook | null)?.content;
  if (!content?.activeCellChanged) return;
  const follow = (): void => {
    content.activeCell?.model.contentChanged.connect(changed);
    changed();
  };
  if (!followed.has(content)) content.activeCellChanged.connect(follow);
  followed.add(content);
  follow();
}

const followed = new WeakSet<object>();

export function toggleRecording({ content, sessionContext }: Notebook, options: string): void {
  const cell = content.activeCell!.model.sharedModel;
  const source = cell.getSource();
  if (MAGIC.test(source)) {
    cell.setSource(source.replace(MAGIC, ''));
    return;
  }
  cell.setSource(`${`%%llmdump ${options}`.trim()}\n${source}`);
  const notebook = content.model!.sharedModel;
  if (notebook.cells.some(one => one.getSource().includes('load_ext llmdebug_nb'))) return;
  notebook.insertCell(content.activeCellIndex, { cell_type: 'code', source: LOAD });
  // the cell says it for the next time; for this time it is done
  sessionContext.session?.kernel?.requestExecute({
    code: LOAD,
    silent: true,
    store_history: false,
  });
}
