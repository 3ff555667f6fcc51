import { expect, test } from 'vitest';
import schema from '../schema/plugin.json';
import { COMMANDS } from '../src/plugin/commands';

test('every command has an id of its own, in our name', () => {
  const ids = Object.values(COMMANDS);
  expect(new Set(ids).size).toBe(ids.length);
  expect(ids.every(id => id.startsWith('llmdebug:'))).toBe(true);
});

test('menus and toolbars of the settings name commands that there are', () => {
  const named = [...JSON.stringify(schema).matchAll(/"command":"([^"]+)"/g)].map(found => found[1]);
  expect(named.length).toBeGreaterThan(0);
  expect(Object.values(COMMANDS)).toEqual(expect.arrayContaining(named));
});
