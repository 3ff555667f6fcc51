/** Adds `%%llmdump` to a notebook's active cell, or removes it. */
import type { ISessionContext } from '@jupyterlab/apputils';
import type { Widget } from '@lumino/widgets';

const MAGIC = /^\s*%%llmdump\b[^\n]*\n?/;
const LOAD = '%load_ext llmdebug_nb';

interface Signal {
  connect(slot: () => void): boolean;
}

/** The part of a NotebookPanel that we use. Its package would add a hundred others for types. */
export interface Notebook extends Widget {
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

/** Return the notebook if its active cell is a code cell. */
export function codeNotebook(widget: Widget | null): Notebook | null {
  const notebook = widget as Notebook | null;
  return notebook?.content?.activeCell?.model.type === 'code' && notebook.content.model
    ? notebook
    : null;
}

export function isRecording(widget: Widget | null): boolean {
  return MAGIC.test(codeNotebook(widget)?.content.activeCell?.model.sharedModel.getSource() ?? '');
}

/**
 * Call `changed` when a notebook's active cell changes, or its text.
 *
 * Following a notebook again has no effect.
 */
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

/** Add the magic with `options` to the active cell, or remove it. */
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
  // the new cell is for the next session; this one gets the extension now
  sessionContext.session?.kernel?.requestExecute({
    code: LOAD,
    silent: true,
    store_history: false,
  });
}
