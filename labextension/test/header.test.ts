// @vitest-environment happy-dom
import { expect, test } from 'vitest';
import { header, verdictBadge } from '../src/widget/header';
import { VERDICTS } from '../src/widget/strings';
import type { Verdict } from '../src/widget/wire';
import { overview, texts } from './fakes';

test('title, figures and notes of a run stand in this order, as text', () => {
  const root = header(
    overview({ title: '<i>run</i>', lines: ['3 steps', '<u>4</u>'], notes: ['only bf16'] }),
  );
  expect(texts(root, 'h2, .llmdebug-line, .llmdebug-note')).toEqual([
    '<i>run</i>',
    '3 steps',
    '<u>4</u>',
    'only bf16',
  ]);
  expect(root.querySelector('i, u')).toBeNull();
});

test('a run without figures has its title alone', () => {
  expect(texts(header(overview({ title: 'run' })), 'h2, .llmdebug-line')).toEqual(['run']);
});

test.each(Object.keys(VERDICTS) as Verdict[])('%s is told by sign and word', verdict => {
  const { mark, text } = VERDICTS[verdict];
  const badge = verdictBadge(verdict);
  expect(badge.textContent).toBe(`${mark} ${text}`);
  expect(badge.classList.contains(`llmdebug-${verdict}`)).toBe(true);
});

test('no two verdicts look alike without colours', () => {
  const shown = Object.keys(VERDICTS).map(one => verdictBadge(one as Verdict).textContent);
  expect(new Set(shown).size).toBe(shown.length);
});
