// @vitest-environment happy-dom
import { expect, test, vi } from 'vitest';
import { Answer, lineOf, OPEN_LINE } from '../src/widget/answer';
import type { Ask } from '../src/widget/rpc';
import type { CodeLine, CodeView, FindingView, Overview } from '../src/widget/wire';
import { later } from './jupyter';

const finding: FindingView = {
  path: 'layers.1.mlp',
  op: 'MLP',
  step: 0,
  cause: 'introduced',
  evidence: 'its inputs agree',
  row: 7,
  head: 'Made in',
  place: 'port.py:30',
  where: 'layers.1.mlp (Fast, was MLP)',
  what: 'Twice the value.',
  which: 'Tokens 12-39 of 40 differ.',
  why: 'its inputs agree.',
  do: 'Look at the scale.',
  file: 'port.py',
  line: 30,
  proof: '',
  expected: '',
  mark: -1,
};

function overview(findings: FindingView[], more: Partial<Overview> = {}): Overview {
  return {
    kind: 'report',
    title: 'golden against mine',
    golden: 'golden',
    mine: 'mine',
    verdict: findings.length ? 'diverged' : 'match',
    caution: '',
    lines: ['3 rows', 'Coverage: all'],
    summary: 'Nothing diverges.',
    notes: ['limits: noise'],
    steps: [],
    findings,
    marks: [],
    kept: '',
    first_bad: -1,
    rows: 3,
    ranks: [],
    inside: false,
    halt: 0,
    ...more,
  };
}

function answer(shown: Overview) {
  const ask = vi.fn((op: string) =>
    Promise.resolve({
      answer: op === 'finding' ? { script: 'print()', save: 's' } : shown,
      buffers: [],
    }),
  );
  const events = { show: vi.fn(), chosen: vi.fn(), updated: vi.fn(), say: vi.fn() };
  const it = new Answer(shown, ask as unknown as Ask, events);
  document.body.replaceChildren(it.root);
  return { it, ask, events, root: it.root };
}

function press(root: HTMLElement, name: string): void {
  const found = [...root.querySelectorAll('button')].find(
    one => one.textContent === name || one.getAttribute('aria-label') === name,
  );
  found!.click();
}

test('the first line names verdict, place and module; then what, why and what to do', () => {
  const { root } = answer(overview([finding]));
  expect(root.querySelector('h2')!.textContent).toBe(
    '✗ diverged Made in port.py:30 · layers.1.mlp (Fast, was MLP)',
  );
  const terms = [...root.querySelectorAll('dt, dd')].map(one => one.textContent);
  expect(terms).toEqual([
    'what',
    'Twice the value.',
    'which',
    'Tokens 12-39 of 40 differ.',
    'why',
    'its inputs agree.',
    'do',
    'Look at the scale.',
  ]);
});

test('a place that is the path is not said twice', () => {
  const { root } = answer(overview([{ ...finding, place: 'lm_head', where: 'lm_head (Linear)' }]));
  expect(root.querySelector('h2')!.textContent).toBe('✗ diverged Made in lm_head (Linear)');
});

test('without a finding it says what was held against what, and how much agrees', () => {
  const { root, events } = answer(overview([], { caution: 'but on only 12 % of the values' }));
  expect(root.textContent).toContain('✓ match but on only 12 % of the values');
  expect(root.textContent).toContain('Coverage: all');
  expect(events.show).toHaveBeenCalledWith(-1, null);
});

test('several findings are chips, and f goes round them', async () => {
  const { it, root, events } = answer(overview([finding, { ...finding, place: 'other.py:1' }]));
  expect([...root.querySelectorAll('[role=radio]')].map(one => one.textContent)).toEqual([
    '✗ port.py:30',
    '✗ other.py:1',
  ]);
  it.next();
  expect(events.chosen).toHaveBeenCalledWith(expect.objectContaining({ place: 'other.py:1' }));
  await vi.waitFor(() => expect(events.show).toHaveBeenLastCalledWith(1, expect.anything()));
  it.next();
  expect(it.at).toBe(0);
});

test('JupyterLab may open the line; else its place is said', () => {
  const { root, events } = answer(overview([finding]));
  press(root, 'Open line');
  const asked = vi.fn((event: Event) => event.preventDefault());
  root.addEventListener(OPEN_LINE, asked);
  events.say.mockClear();
  press(root, 'Open line');
  expect((asked.mock.calls[0]![0] as CustomEvent).detail).toMatchObject({
    file: 'port.py',
    line: 30,
  });
  expect(events.say).not.toHaveBeenCalled();
});

test('a proof is computed by the kernel, and what it says is shown', async () => {
  const proven = overview([{ ...finding, proof: 'All rows agree now.' }]);
  const { it, root, ask, events } = answer(overview([finding]));
  ask.mockResolvedValue({ answer: proven, buffers: [] });
  press(root, 'Prove');
  await vi.waitFor(() =>
    expect(events.updated).toHaveBeenCalledWith(proven, 'All rows agree now.'),
  );
  expect(ask).toHaveBeenCalledWith('prove', { finding: 0 });
  it.take(proven);
  expect(root.textContent).toContain('All rows agree now.');
});

test('a proof that runs is not asked for again, also if the answer is drawn anew', async () => {
  const { it, root, ask, events } = answer(overview([finding]));
  const slow = later<unknown>();
  ask.mockImplementation(() => slow.promise as never);
  press(root, 'Prove');
  it.take(overview([finding], { lines: ['4 rows'] }));
  const prove = () =>
    [...root.querySelectorAll('button')].find(one => one.textContent === 'Prove')!;
  expect(prove().disabled).toBe(true);
  slow.resolve(null); // the kernel could not
  await vi.waitFor(() => expect(prove().disabled).toBe(false));
  expect(events.updated).not.toHaveBeenCalled();
});

test('only a module can be looked into, and from inside there is a way back', () => {
  const names = (shown: Overview) =>
    [...answer(shown).root.querySelectorAll('button')].map(one => one.textContent);
  expect(names(overview([finding]))).toContain('Look inside');
  expect(names(overview([{ ...finding, path: 'a/Torch.add' }]))).not.toContain('Look inside');
  expect(names(overview([finding], { inside: true }))).toContain('Back');
});

test('a finding without a file has no line to open', () => {
  const { root } = answer(overview([{ ...finding, file: '', line: 0 }]));
  expect(root.textContent).not.toContain('Open line');
});

test('marks, figures and notes are behind one button, the script behind another', async () => {
  const { root, events } = answer(overview([finding]));
  await vi.waitFor(() => expect(events.show).toHaveBeenCalled());
  expect(root.textContent).not.toContain('limits: noise');
  press(root, 'More: mark as expected, figures, notes');
  expect(root.textContent).toContain('limits: noise');
  expect(root.querySelector('[data-mark]')).not.toBeNull();
  press(root, 'Repro');
  expect(root.querySelector('pre')!.textContent).toBe('print()');
});

test('of a module of torch, the line that calls it is opened', () => {
  const line = { mine_line: 164, golden_line: 164 } as CodeLine;
  const listing = { mine_file: 'model.py', lines: [line], at: 0 } as unknown as CodeView;
  expect(lineOf({ file: '', line: 0 }, { listing })).toEqual({ file: 'model.py', line: 164 });
  const none = { ...listing, at: -1 };
  expect(lineOf({ file: 'a.py', line: 3 }, { listing: none })).toEqual({ file: 'a.py', line: 3 });
});
