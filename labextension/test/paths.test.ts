import { expect, test } from 'vitest';
import { nameOf, parentOf } from '../src/plugin/paths';

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
