import { expect, test } from 'vitest';

declare global {
  interface ImportMeta {
    /** Vite lists the files; their contents are not loaded. */
    glob(pattern: string): Record<string, unknown>;
  }
}

const SOURCES = Object.keys(import.meta.glob('../src/**/*.ts')).map(path => path.slice(7));
const TESTS = new Set(Object.keys(import.meta.glob('./*.test.ts')).map(path => path.slice(2)));

/** Modules without code, which nothing can test. */
const WITHOUT: Record<string, string> = {
  'widget/wire.ts': 'types and columns, written by wire_types.py from those of Python',
  'plugin/wire.ts': 'types, written by wire_types.py from those of Python',
  'widget/css.d.ts': 'the type of a style sheet',
  'plugin/svg.d.ts': 'the type of a picture',
  'protocol/messages.ts': 'types of messages',
};

const nameOf = (source: string) => source.replace(/^.*\//, '').replace(/(\.d)?\.ts$/, '');

/** The test of a module has its name, with that of its folder before it where two have one. */
function testOf(source: string): string {
  const shared = SOURCES.filter(one => nameOf(one) === nameOf(source)).length > 1;
  const folder = source.split('/').at(-2);
  return `${shared ? `${folder}_` : ''}${nameOf(source)}.test.ts`;
}

test('every module has a test of its name', () => {
  expect(SOURCES.length).toBeGreaterThan(50);
  const missing = SOURCES.filter(source => !(source in WITHOUT) && !TESTS.has(testOf(source)));
  expect(missing).toEqual([]);
});

test('what is said to have no test is there, and has none', () => {
  for (const source of Object.keys(WITHOUT)) {
    expect(SOURCES).toContain(source);
    expect([...TESTS]).not.toContain(testOf(source));
  }
});

test('every test is of a module', () => {
  const modules = new Set(SOURCES.map(testOf));
  const others = [...TESTS].filter(one => !modules.has(one) && one !== 'every_module.test.ts');
  expect(others).toEqual([]);
});
