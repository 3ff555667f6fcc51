// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { drawSaved } from '../src/page/draw';
import * as T from '../src/widget/strings';
import type { SavedPage } from '../src/widget/wire';
import { drawing, named, overview, row, sized } from './fakes';

beforeEach(() => {
  drawing();
  sized(900, 300);
});
afterEach(() => void vi.restoreAllMocks());

const PAGE: SavedPage = {
  state: {
    ...{ position: 1, selected: 2, path: '', mismatch: false, text: '' },
    ...{ which: 'golden', axes: [], fixed: [] },
  },
  snapshot: overview({ kind: 'run', title: 'run <b>', verdict: null }),
  nodes: [],
  parents: [],
  rows: [row(1), row(2, { step: 1 })],
  homes: [-1, -1],
  answers: [],
};

async function packed(text: string): Promise<string> {
  const zipped = new Response(text).body!.pipeThrough(new CompressionStream('gzip'));
  const bytes = new Uint8Array(await new Response(zipped).arrayBuffer());
  return btoa(String.fromCharCode(...bytes));
}

test('a saved explorer is drawn without a kernel, in the state it was saved in', async () => {
  const el = document.createElement('div');
  document.body.replaceChildren(el);
  el.textContent = 'before';
  const undraw = await drawSaved(el, await packed(JSON.stringify(PAGE)));
  expect(el.textContent).not.toContain('before');
  expect(el.querySelector('h2')!.textContent).toBe('run <b>');
  await vi.waitFor(() => expect(el.querySelector('[data-row="2"]')).not.toBeNull());
  expect(el.querySelector('.llmdebug-step[aria-current]')!.textContent).toBe('1 decode');
  expect(named(el, `HTML: ${T.saveAs.html}`)).toBeUndefined(); // it is saved already
  undraw();
  expect(el.childElementCount).toBe(0);
});

test('what the page does not hold is said', async () => {
  const el = document.createElement('div');
  document.body.replaceChildren(el);
  await drawSaved(el, await packed(JSON.stringify(PAGE)));
  await vi.waitFor(() => expect(el.querySelector('[role=status]')!.textContent).toBe(T.notInPage));
});

test.each([
  ['no base64', () => Promise.resolve('*')],
  ['not packed', () => Promise.resolve(btoa('plain'))],
  ['no JSON', () => packed('<html>')],
])('data that is %s is an error, and leaves the element as it was', async (_, text) => {
  const el = document.createElement('div');
  el.textContent = 'before';
  await expect(text().then(data => drawSaved(el, data))).rejects.toThrow();
  expect(el.textContent).toBe('before');
});
