import { expect, test } from 'vitest';
import { optionOf } from '../src/plugin/magic_help';

const HELP = [
  '::',
  '  %llmdump [--tokens T] [--name NAME]',
  'options:',
  '  --tokens T          Which tokens',
  '                      to record.',
  '  --name NAME, -n NAME',
  '                      Name of the run.',
  'Record the model.',
].join('\n');

test('the paragraph of an option ends where the next option begins', () => {
  const text = optionOf(HELP, '--tokens');
  expect(text).toContain('to record.');
  expect(text).not.toContain('--name');
});

test('an option is found by its whole name only', () => {
  expect(optionOf(HELP, '--name')).toContain('Name of the run.');
  expect([optionOf(HELP, '--tok'), optionOf(HELP, '--nothing')]).toEqual(['', '']);
});
