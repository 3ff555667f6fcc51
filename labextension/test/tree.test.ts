// @vitest-environment happy-dom
import { expect, test, vi } from 'vitest';
import type { Ask } from '../src/widget/rpc';
import { Tree } from '../src/widget/tree';
import type { TreeNode } from '../src/widget/wire';

const PATHS = ['', 'a', 'a.b', 'a.b.c', 'd'];
const PARENTS = [-1, 0, 1, 2, 0];
const node = (id: number): TreeNode => ({
  ...{ type: 'Linear', rows: 1, bad: 0, unmatched: 0, expected: 0, verdict: null, note: '' },
  ...{ id, path: PATHS[id]!, label: PATHS[id]!.split('.').at(-1)! },
  children: PARENTS.filter(parent => parent === id).length,
});

/** A tree whose kernel sends one child per page and answers `path` for `a.b`. */
async function tree(failing = new Set<number>()) {
  const ask = (op: string, { parent, start }: { parent: number; start: number }) => {
    if (op === 'path') return Promise.resolve({ answer: { ids: [0, 1, 2] } });
    if (failing.has(parent)) return Promise.resolve(undefined);
    const kids = PATHS.map((_, id) => id).filter(id => PARENTS[id] === parent);
    const nodes = kids.slice(start, start + 1).map(node);
    return Promise.resolve({ answer: { total: kids.length, nodes } });
  };
  const chosen = vi.fn();
  const made = new Tree(ask as unknown as Ask, one => {
    chosen(one.path);
    made.mark(one);
  });
  document.body.replaceChildren(made.root);
  await made.start();
  const list = made.root.querySelector('[role=tree]')!;
  const settle = () => new Promise(resolve => setTimeout(resolve));
  await settle();
  const press = async (...keys: string[]) => {
    for (const key of keys) {
      list.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
      await settle();
    }
  };
  const items = () => [...list.querySelectorAll('[role=treeitem]')];
  const labels = () => items().map(item => item.querySelector('.llmdebug-node-label')!.textContent);
  const open = (label: string) =>
    items()[labels().indexOf(label)]?.getAttribute('aria-expanded') ?? null;
  return { made, chosen, press, labels, open, settle };
}

test('a single root is open from the start, with all pages of its children in view', async () => {
  const { labels, open } = await tree();
  expect(labels()).toEqual(['', 'a', 'd']);
  expect([open(''), open('a'), open('d')]).toEqual(['true', 'false', null]);
});

test('arrow keys open, enter, leave and close modules', async () => {
  const { press, labels } = await tree();
  await press('ArrowDown', 'ArrowRight', 'ArrowRight');
  expect(labels()).toEqual(['', 'a', 'b', 'd']);
  await press('ArrowLeft', 'ArrowLeft');
  expect(labels()).toEqual(['', 'a', 'd']);
});

test('Enter selects a module and opens it the first time', async () => {
  const { press, labels, chosen } = await tree();
  await press('ArrowDown', 'Enter');
  expect(chosen.mock.calls).toEqual([['a']]);
  expect(labels()).toEqual(['', 'a', 'b', 'd']);
  await press('ArrowLeft', 'Enter');
  expect(labels()).toEqual(['', 'a', 'd']);
});

test('a module is found by its path, and its ancestors are opened', async () => {
  const { made, labels } = await tree();
  const found = await made.find('a.b');
  made.mark(found);
  expect([found?.path, labels()]).toEqual(['a.b', ['', 'a', 'b', 'd']]);
});

test('a module that could not be read closes, and opening it again reads it again', async () => {
  const failing = new Set([1]);
  const { press, labels, open } = await tree(failing);
  await press('ArrowDown', 'ArrowRight');
  expect([open('a'), labels()]).toEqual(['false', ['', 'a', 'd']]);
  failing.clear();
  await press('ArrowRight');
  expect(labels()).toEqual(['', 'a', 'b', 'd']);
});

test('a reload keeps open modules open', async () => {
  const { made, press, labels } = await tree();
  await press('ArrowDown', 'ArrowRight');
  await made.reload();
  expect(labels()).toEqual(['', 'a', 'b', 'd']);
});

test('the selected record is highlighted at its closest visible ancestor', async () => {
  const { made, press } = await tree();
  const here = () => made.root.querySelector('.llmdebug-here .llmdebug-node-label')?.textContent;
  made.pointAt('a.b.c');
  expect(here()).toBe('a');
  await press('ArrowDown', 'ArrowRight');
  expect(here()).toBe('b');
});
