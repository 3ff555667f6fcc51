import { expect, test } from 'vitest';
import { nameOf, parentOf } from '../src/plugin/paths';
import { size } from '../src/plugin/run_list';

test.each([
  ['/a/b/run', 'run'],
  ['/a/b/run//', 'run'],
  ['C:\\runs\\mine\\', 'mine'],
  ['run', 'run'],
])('the name of %s is %s', (path, name) => {
  expect(nameOf(path)).toBe(name);
});

test.each([
  ['a/b/run', 'a/b'],
  ['notebook.ipynb', ''],
  ['', ''],
])('the folder of %s is %s', (path, parent) => {
  expect(parentOf(path)).toBe(parent);
});

test.each([
  [0, '0 B'],
  [999, '999 B'],
  [1000, '1.0 kB'],
  [2_500_000, '2.5 MB'],
  [3.2e15, '3200.0 TB'],
])('%i bytes are shown as %s', (bytes, text) => {
  expect(size(bytes)).toBe(text);
});
