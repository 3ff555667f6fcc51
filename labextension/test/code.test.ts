// @vitest-environment happy-dom
import { expect, test, vi } from 'vitest';
import { Code, codeAt, codeOf } from '../src/widget/code';
import type {
  CodeLine,
  FindingDetail,
  FindingView,
  HaltView,
  SourceView,
} from '../src/widget/wire';

const finding = { file: 'port.py', line: 30 } as FindingView;
const line: CodeLine = {
  golden_line: 12,
  golden: 'x = a * scale',
  mine_line: 30,
  mine: 'x = <b>a</b>',
  state: 'guilty',
  error: 0.25,
};
const golden: SourceView = {
  which: 'golden',
  place: 'model.py:12 forward',
  call: 'layers.0/Torch.mul (Torch.mul)',
  code: 'x = a * scale',
  frames: ['model.py:41 forward'],
};

function detail(lines: CodeLine[], note = '', sources: SourceView[] = []): FindingDetail {
  const listing = {
    golden_file: 'lib/model.py',
    golden_function: 'MLP.forward',
    mine_file: 'port.py',
    mine_function: 'Fast.forward',
    lines,
    at: lines.length ? 0 : -1,
    note,
  };
  const none = { script: '', why: '', save: '', relation: '', advice: '', kernel: '', code: '' };
  return { ...none, sources, pairs: [], listing };
}

function shown(what: FindingDetail): HTMLElement {
  const code = new Code(vi.fn());
  code.show(codeOf(finding, what));
  return code.root;
}

test('golden and mine stand in one line, with numbers, the figure and its mark', () => {
  const root = shown(detail([line]));
  const cells = [...root.querySelectorAll('tr td')].map(cell => cell.textContent);
  expect(cells).toEqual(['12', 'x = a * scale', '30', 'x = <b>a</b>', '0.25 ✗']);
  expect(root.querySelector('b + *')).not.toBeNull();
  expect(root.querySelector('td b')).toBeNull();
});

test('the line to blame is marked, others are not', () => {
  const root = shown(detail([line, { ...line, state: 'inherited', error: 0.2 }]));
  const guilty = [...root.querySelectorAll('tr')].map(row => row.hasAttribute('data-guilty'));
  expect(guilty).toEqual([true, false]);
});

test('a line that one side lacks has no number there; an equal line has no figure', () => {
  const root = shown(detail([{ ...line, golden_line: 0, golden: '', state: 'equal', error: 0 }]));
  const cells = [...root.querySelectorAll('tr td')].map(cell => cell.textContent);
  expect(cells).toEqual(['', '', '30', 'x = <b>a</b>', '=']);
});

test('without functions there are the calls of both sides, and why there is no more', () => {
  const root = shown(detail([], 'golden was recorded without sources', [golden]));
  expect(root.textContent).toContain('model.py:12 forward');
  expect(root.textContent).toContain('called at model.py:41 forward');
  expect(root.textContent).toContain('golden was recorded without sources');
});

test('without a finding there is no code', () => {
  const code = new Code(vi.fn());
  code.show(null);
  expect(code.root.hidden).toBe(true);
});

test('a halt shows the one program, with its line marked', () => {
  const code = new Code(vi.fn());
  const { listing } = detail([
    { ...line, state: '', error: null },
    { ...line, state: 'halted', error: null },
  ]);
  code.show(codeAt({ line: 31, listing: { ...listing, at: 1 } } as HaltView));
  expect(code.root.classList.contains('llmdebug-one-side')).toBe(true);
  const marked = [...code.root.querySelectorAll('[data-guilty]')];
  expect(marked.map(row => row.getAttribute('aria-label'))).toEqual(['the program is halted here']);
  expect(marked[0]!.textContent).toContain('◂');
});
