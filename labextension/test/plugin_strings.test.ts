// @vitest-environment happy-dom
import { expect, test } from 'vitest';
import { strings } from '../src/plugin/strings';
import { BUNDLE, t } from './jupyter';

test('names, which may hold any character, are put into the texts by the translator', () => {
  expect(t.willCompare('a', 'b')).toBe('Golden: a. Mine: b.');
  expect(t.nothingFound('<b>')).toContain('“<b>”');
  expect([t.tab('a', ''), t.tab('a', 'b')]).toEqual(['a', 'a and b']);
  expect(t.notInstalled('python3', 'ImportError')).toContain('"python3" has no llmdebug-nb (Imp');
});

test('one thing is singular, several are plural', () => {
  expect([t.tensors(1), t.tensors(2), t.steps(1), t.steps(0)]).toEqual([
    '1 tensor',
    '2 tensors',
    '1 step',
    '0 steps',
  ]);
});

test('the magic is not read as a place of the translator', () => {
  expect([t.noRuns, t.recordCell].every(text => text.includes('%%llmdump'))).toBe(true);
});

test('every text goes through the translator', () => {
  const upper = (text: string) => text.toUpperCase();
  const said = strings({ ...BUNDLE, __: upper } as never);
  const texts = Object.values(said).filter(text => typeof text === 'string');
  expect(texts.filter(text => text !== text.toUpperCase())).toEqual([]);
});
