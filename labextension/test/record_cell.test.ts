import { expect, test } from 'vitest';
import { codeNotebook, isRecording, toggleRecording } from '../src/plugin/record_cell';
import type { Notebook } from '../src/plugin/record_cell';

interface Cell {
  source: string;
  getSource: () => string;
  setSource: (source: string) => void;
}

function cell(source: string): Cell {
  const made: Cell = {
    source,
    getSource: () => made.source,
    setSource: text => void (made.source = text),
  };
  return made;
}

/** A notebook of code cells whose last one is active. */
function notebook(...sources: string[]) {
  const cells = sources.map(cell);
  const executed: string[] = [];
  const kernel = { requestExecute: ({ code }: { code: string }) => executed.push(code) };
  const made = {
    content: {
      activeCell: { model: { type: 'code', sharedModel: cells.at(-1) } },
      activeCellIndex: cells.length - 1,
      model: {
        sharedModel: {
          cells,
          insertCell: (at: number, { source }: { source: string }) =>
            cells.splice(at, 0, cell(source)),
        },
      },
    },
    sessionContext: { session: { kernel } },
  } as unknown as Notebook;
  return { made, executed, texts: () => cells.map(one => one.source) };
}

test('the magic is added with its options, and the extension is loaded above it and now', () => {
  const { made, executed, texts } = notebook('model(x)');
  toggleRecording(made, '--tokens 0-3');
  expect(texts()).toEqual(['%load_ext llmdebug_nb', '%%llmdump --tokens 0-3\nmodel(x)']);
  expect(executed).toEqual(['%load_ext llmdebug_nb']);
  expect(isRecording(made)).toBe(true);
});

test('without options the magic ends without a blank', () => {
  const { made, texts } = notebook('%load_ext llmdebug_nb', 'x');
  toggleRecording(made, '');
  expect(texts()[1]).toBe('%%llmdump\nx');
});

test('a notebook that loads the extension gets no second cell for it', () => {
  const { made, executed, texts } = notebook('%load_ext llmdebug_nb', 'x');
  toggleRecording(made, '');
  expect([texts().length, executed.length]).toEqual([2, 0]);
});

test('adding and removing the magic restores the text of the cell', () => {
  const { made, texts } = notebook('%load_ext llmdebug_nb', 'model(x)\n\ny = 1\n');
  toggleRecording(made, '--stats-only');
  toggleRecording(made, '');
  expect(texts()[1]).toBe('model(x)\n\ny = 1\n');
});

test('only a line magic at the top of a code cell counts as recording', () => {
  expect(isRecording(notebook('x\n%%llmdump').made)).toBe(false);
  expect(isRecording(notebook('%%llmdumper\nx').made)).toBe(false);
  expect(isRecording(notebook('\n%%llmdump\nx').made)).toBe(true);
  const { made } = notebook('%%llmdump');
  made.content.activeCell!.model.type = 'markdown';
  expect([codeNotebook(made), isRecording(made), codeNotebook(null)]).toEqual([null, false, null]);
});
