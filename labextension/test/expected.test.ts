// @vitest-environment happy-dom
import { expect, test, vi } from 'vitest';
import { MarkForm, markList, unmarkButton, type Target } from '../src/widget/expected';
import { SCOPES } from '../src/widget/strings';
import * as T from '../src/widget/strings';
import type { Overview } from '../src/widget/wire';
import { Kernel, named, overview, press, settled, texts } from './fakes';

const AFTER = overview({ title: 'after' });

function marking(answer: Overview | undefined = AFTER) {
  const kernel = new Kernel({ expect: () => answer, unexpect: () => answer });
  return { kernel, ask: kernel.ask, updated: vi.fn() };
}

function form(target: Target = { row: 7 }, answer?: Overview | null) {
  const made = marking(answer === null ? undefined : answer);
  if (answer === null) made.kernel = new Kernel({});
  const it = new MarkForm(target, 'row', { ...made, ask: made.kernel.ask });
  document.body.replaceChildren(it.root);
  const [toggle, fields] = [named(it.root, T.expect), it.root.querySelector('form')!];
  const comment = it.root.querySelector('input')!;
  const submit = () => fields.dispatchEvent(new Event('submit', { cancelable: true }));
  return { it, ...made, toggle, fields, comment, submit };
}

test('the form opens with its reason focused, and closes to its button', () => {
  const { toggle, fields, comment, it } = form();
  expect([fields.hidden, toggle.getAttribute('aria-expanded')]).toEqual([true, 'false']);
  expect(toggle.getAttribute('aria-controls')).toBe(fields.id);
  toggle.click();
  expect([fields.hidden, toggle.getAttribute('aria-expanded')]).toEqual([false, 'true']);
  expect(document.activeElement).toBe(comment);
  named(it.root, T.cancel).click();
  expect([fields.hidden, document.activeElement]).toEqual([true, toggle]);
});

test('Escape closes the form and is not seen by Jupyter; other keys are typed', () => {
  const { toggle, fields, comment } = form();
  toggle.click();
  expect(press(comment, 'x').defaultPrevented).toBe(false);
  expect(press(comment, 'Escape').defaultPrevented).toBe(true);
  expect(fields.hidden).toBe(true);
});

test('a row is marked in the scope that was chosen, with the reason', async () => {
  const { kernel, updated, comment, submit, it } = form();
  const scope = it.root.querySelector('select')!;
  expect(texts(scope, 'option')).toEqual(Object.values(SCOPES));
  scope.value = 'module';
  comment.value = '  fused <b>kernel</b> ';
  submit();
  await settled();
  expect(kernel.of('expect')).toEqual([
    { row: 7, finding: -1, scope: 'module', comment: 'fused <b>kernel</b>' },
  ]);
  expect(updated.mock.calls).toEqual([[AFTER, T.markedNow]]);
});

test('a finding has no scope to choose', async () => {
  const { kernel, submit, it } = form({ finding: 2 });
  expect(it.root.querySelector('select')).toBeNull();
  submit();
  await settled();
  expect(kernel.of('expect')[0]).toMatchObject({ row: -1, finding: 2, comment: '' });
});

test('a second press while the kernel works does not mark twice', async () => {
  const { kernel, submit } = form();
  kernel.held = true;
  submit();
  submit();
  await kernel.reply();
  expect(kernel.of('expect').length).toBe(1);
  submit();
  expect(kernel.of('expect').length).toBe(2);
});

test('after an error the form stays, with what was typed', async () => {
  const { updated, toggle, comment, fields, submit } = form({ row: 7 }, null);
  toggle.click();
  comment.value = 'why';
  submit();
  await settled();
  expect([updated.mock.calls.length, fields.hidden, comment.value]).toEqual([0, false, 'why']);
});

const marks = [
  { text: 'lm_head <i>', comment: '<u>known</u>', rows: 3 },
  { text: 'norm', comment: '', rows: 0 },
];

test('a mark is removed by a button that says which', async () => {
  const { kernel, ask, updated } = marking();
  const made = unmarkButton(overview({ marks }), 0, 'key', { ask, updated });
  expect(made.getAttribute('aria-label')).toBe('Remove the mark on lm_head <i> (3 mismatches)');
  made.click();
  await settled();
  expect(kernel.of('unexpect')).toEqual([{ mark: 0, text: 'lm_head <i>' }]);
  expect(updated.mock.calls).toEqual([[AFTER, T.unmarkedNow]]);
});

test('a second press while the kernel works does not remove the next mark', async () => {
  const { kernel, ask, updated } = marking();
  const made = unmarkButton(overview({ marks }), 0, 'key', { ask, updated });
  kernel.held = true;
  made.click();
  made.click();
  await kernel.reply();
  expect(kernel.of('unexpect').length).toBe(1);
});

test('all marks are listed as text, with their reasons and how much they cover', () => {
  const { ask, updated } = marking();
  const list = markList(overview({ marks, kept: 'runs/expected.json' }), { ask, updated });
  expect(list.querySelector('summary')!.textContent).toBe('Marked as expected: 2');
  expect(texts(list, 'li')).toEqual([
    'Unmark lm_head <i> <u>known</u> 3 mismatches',
    'Unmark norm  matches no difference in this comparison',
  ]);
  expect([list.querySelector('i, u'), list.lastElementChild!.textContent]).toEqual([
    null,
    'saved in runs/expected.json',
  ]);
});

test('marks that are kept nowhere say so', () => {
  const { ask, updated } = marking();
  const list = markList(overview({ marks }), { ask, updated });
  expect(list.lastElementChild!.textContent).toBe(T.keptNowhere);
});
