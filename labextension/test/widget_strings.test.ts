import { expect, test } from 'vitest';
import * as T from '../src/widget/strings';

test('one thing is singular, several are plural, and thousands are grouped', () => {
  expect([0, 1, 1234567].map(T.count)).toEqual(['0 records', '1 record', '1,234,567 records']);
  expect(T.unmark('lm_head', 1)).toContain('(1 mismatch)');
  expect(T.unmark('lm_head', 2)).toContain('(2 mismatches)');
});

test('an exclusive range is shown by its first and last element', () => {
  expect(T.window(['token', 'feature'], [0, 4, 2, 3])).toBe('token 0–3 ↓, feature 2–2 →');
  expect(T.windowFlat('feature', 0, 4)).toBe('feature 0–3 →');
  expect(T.headsShown(64, 64, 150)).toBe('64 to 127 of 150, same colour scale');
  expect(T.headsShown(0, 8, 8)).toBe('8, same colour scale');
});

test('a cell that shows one element needs no explanation', () => {
  expect(T.cells(1, 1)).toBe('');
  expect(T.cells(1, 3)).toContain('1 × 3');
});

test('only counts above zero of NaN and inf are shown', () => {
  expect(T.notFinite(0, 0)).toEqual([]);
  expect(T.notFinite(2, 1)).toEqual(['NaN 2', 'inf 1']);
});

test('states are in the order of their numbers', async () => {
  const { DIVERGED, MADE, NOTHING, REWRITTEN, UNMATCHED } =
    await import('../src/widget/layererrors');
  const states = [NOTHING, UNMATCHED, REWRITTEN, DIVERGED, MADE].map(state => T.STATES[state]);
  expect(states).toEqual([
    'nothing recorded',
    'unmatched',
    'written otherwise, equal in effect',
    'diverged, inherited',
    'diverged, made here',
  ]);
});
