// @vitest-environment happy-dom
import { expect, test } from 'vitest';
import { sourceViews } from '../src/widget/sources';
import type { FindingDetail, SourceView } from '../src/widget/wire';

const golden: SourceView = {
  which: 'golden',
  place: 'model.py:12 forward',
  call: 'layers.0/Torch.mul (Torch.mul)',
  code: 'x = a * scale',
  frames: [],
};
const mine: SourceView = {
  which: 'mine',
  place: 'port.py:30 scaled',
  call: 'layers.0/Torch.div (Torch.div)',
  code: 'x = a / scale',
  frames: ['port.py:41 forward'],
};
const nothing: FindingDetail = {
  script: '',
  why: '',
  save: '',
  relation: '',
  advice: '',
  sources: [],
  pairs: [],
  kernel: '',
  code: '',
};

test('both sources stand side by side, each with its line and what called it', () => {
  const [found] = sourceViews({ ...nothing, sources: [golden, mine] });
  const [left, right] = [...found!.children];
  expect(left!.querySelector('pre')!.textContent).toBe('x = a * scale');
  expect(right!.querySelector('pre')!.textContent).toBe('x = a / scale');
  expect(left!.textContent).toContain('model.py:12 forward');
  expect(right!.textContent).toContain('called at port.py:41 forward');
  expect(left!.textContent).not.toContain('called at');
});

test('a program without the call has no code', () => {
  const none = { ...mine, place: 'makes no such call', call: '', code: '', frames: [] };
  const [found] = sourceViews({ ...nothing, sources: [golden, none] });
  expect(found!.lastElementChild!.textContent).toContain('makes no such call');
  expect(found!.lastElementChild!.querySelector('pre, code')).toBeNull();
});

test('the lines are folded, with their states, and an error only where there is one', () => {
  const views = sourceViews({
    ...nothing,
    pairs: [
      { state: 'guilty', golden: 'a.py:1  x', mine: 'b.py:2  y', error: 0.25 },
      { state: 'rewritten', golden: '', mine: 'b.py:3  z', error: null },
    ],
  });
  const table = views[0] as HTMLDetailsElement;
  expect(table.open).toBe(false);
  const cells = [...table.querySelectorAll('tbody tr')].map(row =>
    [...row.children].map(cell => cell.textContent),
  );
  expect(cells).toEqual([
    ['✗ guilty', 'a.py:1  x', 'b.py:2  y', '0.25'],
    ['≈ rewritten', '', 'b.py:3  z', '–'],
  ]);
});

test('the relation comes first, and what is unknown takes no room', () => {
  expect(sourceViews(nothing)).toEqual([]);
  const texts = sourceViews({ ...nothing, relation: 'transposed', advice: 'Transpose it' });
  expect(texts.map(one => one.textContent)).toEqual(['transposed', 'Transpose it']);
});
