// @vitest-environment happy-dom
import type { AnyModel } from '@anywidget/types';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { PageModel } from '../src/protocol/page_model';
import { explore, type Traits } from '../src/widget/explorer';
import type { Op } from '../src/widget/rpc';
import * as T from '../src/widget/strings';
import type { Overview, Row, TreeNode } from '../src/widget/wire';
import { detail, drawing, named, overview, press, row, settled, side, sized } from './fakes';

/** Rows 0 to 2 of step 0 and 3 to 5 of step 1, of the modules a, b and a. */
const ROWS = [0, 1, 2, 3, 4, 5].map(id =>
  row(id, { step: Math.floor(id / 3), path: id % 3 === 1 ? 'b' : 'a', slot: String(id % 3) }),
);
const NODES: TreeNode[] = ['a', 'b'].map((path, id) => ({
  ...{ id, path, label: path, type: 'Layer', children: 0, rows: 3 },
  ...{ bad: 0, unmatched: 0, expected: 0, verdict: null, note: '' },
}));

beforeEach(() => {
  drawing();
  sized(900, 300);
});
afterEach(() => void vi.restoreAllMocks());

interface Request {
  re: number;
  op: Op;
  row: number;
  node: number;
  step: number;
  path: string;
  text: string;
  delta: number;
  parent: number;
}

/** A kernel behind a model. What it `holds` is answered by `release`. */
function explorer(shown: Partial<Overview> = {}, traits: Partial<Traits> = {}) {
  const asked: Request[] = [];
  const holds = new Set<Op>();
  let waiting: (() => void)[] = [];
  const list = ({ node, text, step }: Request): Row[] =>
    ROWS.filter(
      one =>
        one.step === step &&
        (node < 0 || one.path === NODES[node]!.path) &&
        (!text || one.path.includes(text)),
    );
  const answers: Partial<Record<Op, (request: Request) => object>> = {
    rows: request => ({ total: list(request).length, start: 0, rows: list(request), problem: '' }),
    row: request => {
      const at = ROWS[request.row]!;
      return { row: at, index: list({ ...request, step: at.step }).indexOf(at) };
    },
    locate: ({ row: from, delta }) => ({ row: ROWS[from + delta] ?? null, index: 0 }),
    children: ({ parent }) => (parent < 0 ? { total: 2, nodes: NODES } : { total: 0, nodes: [] }),
    path: ({ path }) => ({ ids: NODES.filter(one => one.path === path).map(one => one.id) }),
    detail: ({ row: id }) => detail(ROWS[id]!, [side('golden')]),
    series: ({ row: id }) => ({
      lines: [
        {
          figure: 'max',
          points: [0, 1].map(at => ({ step: at, row: (id % 3) + 3 * at, value: 1 })),
        },
      ],
    }),
    export: () => ({ path: 'explorer.html' }),
    layers: () => ({ layers: [], steps: 2 }),
    histogram: () => ({ lo: 0, hi: 1, counts: [1], nan: 0, inf: 0, total: 1 }),
  };
  const connection = {
    onMessage: undefined as ((message: object, buffers: DataView[]) => void) | undefined,
    send: (message: object) => {
      const request = message as Request;
      asked.push(request);
      const found = answers[request.op]?.(request) ?? { error: `no ${request.op}` };
      const buffers =
        request.op === 'layers' ? [0, 0, 0, 0].map(() => new DataView(new ArrayBuffer(0))) : [];
      const go = () => connection.onMessage?.({ re: request.re, ...found }, buffers);
      if (holds.has(request.op)) waiting.push(go);
      else queueMicrotask(go);
    },
  };
  const run = { kind: 'run' as const, verdict: null };
  const all = { snapshot: overview({ ...run, ...shown }), position: 0, selected: -1, path: '' };
  const model = new PageModel({ ...all, ...traits }, connection);
  const host = document.createElement('div');
  host.append(document.createElement('div'));
  document.body.replaceChildren(host);
  const dispose = explore(
    model as unknown as AnyModel<Traits>,
    host.firstElementChild as HTMLElement,
  );
  const root = () => host.firstElementChild as HTMLElement;
  const of = (op: Op) => asked.filter(one => one.op === op);
  const state = () => ['position', 'selected', 'path'].map(name => model.get(name));
  const said = () => root().querySelector('.llmdebug-message')!.textContent;
  const hold = (...ops: Op[]) => ops.forEach(op => holds.add(op));
  const release = async () => {
    holds.clear();
    const all = waiting;
    waiting = [];
    all.forEach(go => go());
    await settled();
  };
  const select = async (name: 'position' | 'selected' | 'path', value: number | string) => {
    model.set(name, value);
    await settled();
  };
  const key = async (name: string) => {
    press(root(), name);
    await settled();
  };
  const listed = () =>
    [...root().querySelectorAll<HTMLElement>('[data-row]')].map(one => Number(one.dataset.row));
  return { model, root, of, state, said, hold, release, select, key, listed, dispose };
}

test('a run shows its title, tokens, modules, records and a place for the tensor', async () => {
  const { root, listed } = explorer({ title: 'run <b>' });
  await settled();
  expect([root().getAttribute('role'), root().getAttribute('aria-label')]).toEqual([
    'region',
    'Tensor explorer: run <b>',
  ]);
  expect([root().querySelector('h2')!.textContent, root().querySelector('h2 b')]).toEqual([
    'run <b>',
    null,
  ]);
  expect(listed()).toEqual([0, 1, 2]);
  expect(root().querySelectorAll('[role=treeitem]').length).toBe(2);
  expect(root().textContent).toContain(T.chooseRow);
});

test('a comparison shows answer, code and tensor; the rest is in a drawer', async () => {
  const { root } = explorer({ kind: 'report', verdict: 'match', summary: 'all agree' });
  await settled();
  expect(root().textContent).toContain('all agree');
  const drawer = root().querySelector<HTMLElement>('.llmdebug-drawer')!;
  expect([drawer.hidden, drawer.querySelector('[role=tree]')]).toEqual([true, expect.anything()]);
  expect(root().querySelector('.llmdebug-stepper')).toBeNull();
  named(root(), T.drawer).click();
  expect(drawer.hidden).toBe(false);
});

test('the keys walk through the records, across tokens, and say where they end', async () => {
  const { state, key, said } = explorer({}, { selected: 1 });
  await settled();
  await key('n');
  expect(state()).toEqual([0, 2, '']);
  await key('n');
  expect(state()).toEqual([1, 3, '']);
  await key('p');
  await key('p');
  await key('p');
  await key('p');
  expect([state(), said()]).toEqual([[0, 0, ''], T.noFurther(false, false)]);
  await key('N');
  expect(said()).toBe(T.runHasNoMismatch);
});

test('another token keeps the tensor, if it was recorded there', async () => {
  const { state, key } = explorer({}, { selected: 1 });
  await settled();
  await key(']');
  expect(state()).toEqual([1, 4, '']);
  await key(']');
  expect(state()).toEqual([1, 4, '']);
  await key('[');
  expect(state()).toEqual([0, 1, '']);
});

test('a record that the filter hides is shown without the filter', async () => {
  const { root, select, listed, state } = explorer({}, { path: 'b' });
  await settled();
  expect(listed()).toEqual([1]);
  await select('selected', 2);
  expect([listed(), state()]).toEqual([
    [0, 1, 2],
    [0, 2, ''],
  ]);
  expect(root().querySelector('[aria-selected=true][data-row]')!.getAttribute('data-row')).toBe(
    '2',
  );
});

test('the kernel may narrow the list to a module, and widen it', async () => {
  const { select, listed, root } = explorer();
  await settled();
  await select('path', 'b');
  expect([listed(), named(root(), 'in b ✕')]).toEqual([[1], expect.anything()]);
  await select('path', '');
  expect(listed()).toEqual([0, 1, 2]);
});

test('a module looked up earlier does not narrow the list over a later choice', async () => {
  const { select, listed, hold, release, state } = explorer();
  await settled();
  hold('path');
  await select('path', 'b');
  await select('path', '');
  await release();
  expect([listed(), state()]).toEqual([
    [0, 1, 2],
    [0, -1, ''],
  ]);
});

test('a walk that ends after another record was chosen does not undo the choice', async () => {
  const { key, select, hold, release, state } = explorer({}, { selected: 0 });
  await settled();
  hold('locate');
  await key('n');
  await select('selected', 2);
  await release();
  expect(state()).toEqual([0, 2, '']);
});

test('a token chosen while the tensor of another was looked up stays', async () => {
  const { key, select, hold, release, state } = explorer({}, { selected: 0 });
  await settled();
  hold('series');
  await key(']');
  await select('selected', 2);
  await release();
  expect(state()).toEqual([0, 2, '']);
});

test('a filter chosen while a hidden record was looked up is not cleared', async () => {
  const { root, select, hold, release, listed } = explorer();
  await settled();
  const filter = root().querySelector<HTMLInputElement>('.llmdebug-filter')!;
  filter.value = 'nothing';
  filter.dispatchEvent(new Event('input'));
  await vi.waitFor(() => expect(listed()).toEqual([]));
  hold('row');
  await select('selected', 2);
  filter.value = 'b';
  await release();
  expect(filter.value).toBe('b');
});

test('a record chosen and left at once leaves the filter alone', async () => {
  const { root, select, hold, release, listed } = explorer();
  await settled();
  const filter = root().querySelector<HTMLInputElement>('.llmdebug-filter')!;
  filter.value = 'b';
  filter.dispatchEvent(new Event('input'));
  await vi.waitFor(() => expect(listed()).toEqual([1]));
  hold('row');
  await select('selected', 2); // which the filter hides
  await select('selected', 1); // which it does not
  await release();
  expect([filter.value, listed()]).toEqual(['b', [1]]);
});

test('new verdicts are shown; position and selection stay', async () => {
  const { model, root, state, of } = explorer({ kind: 'report' }, { selected: 1 });
  await settled();
  const before = of('rows').length;
  model.set('snapshot', overview({ verdict: 'expected', summary: 'nothing unexpected' }));
  await settled();
  expect(state()).toEqual([0, 1, '']);
  expect(root().textContent).toContain('nothing unexpected');
  expect([of('rows').length > before, of('detail').length]).toEqual([true, 2]);
});

test('another comparison begins anew, at its first bad row', async () => {
  const { model, state } = explorer({ kind: 'report' }, { selected: 4, position: 1, path: 'b' });
  await settled();
  model.set('snapshot', overview({ inside: true, first_bad: 2 }));
  await settled();
  expect(state()).toEqual([0, 2, '']);
});

test('another halt draws the explorer anew, in the place of the one before', async () => {
  const { model, root } = explorer({ halt: 1 });
  await settled();
  const before = root();
  model.set('snapshot', overview({ halt: 2 }));
  await settled();
  expect(root()).not.toBe(before);
  expect([before.isConnected, root().querySelector('.llmdebug-halt')]).toEqual([
    false,
    expect.anything(),
  ]);
});

test('the view is saved as it is, and the file is named', async () => {
  const { root, of, said } = explorer({}, { selected: 1, path: 'b' });
  await settled();
  named(root(), `HTML: ${T.saveAs.html}`).click();
  await settled();
  expect(of('export')[0]).toMatchObject({ kind: 'html', selected: 1, path: 'b', text: '' });
  expect(said()).toBe('saved: explorer.html');
});

test('an error of the kernel is said, until the next action', async () => {
  const { root, key, said } = explorer({ kind: 'report' }, { selected: 1 });
  await vi.waitFor(() => expect(said()).toMatch(/^no /));
  expect(root().querySelector('.llmdebug-failed')).not.toBeNull();
  await key('Shift');
  expect(said()).toBe('');
});

test('a tab of its own is asked for; where nobody makes one, the screen is filled', async () => {
  const { root, said } = explorer();
  await settled();
  const fill = vi.fn(() => Promise.reject(new Error('denied')));
  Object.assign(root(), { requestFullscreen: fill });
  const asked = vi.fn((event: Event) => event.preventDefault());
  document.addEventListener('llmdebug:pop-out', asked, { once: true });
  named(root(), T.popOut).click();
  expect(fill).not.toHaveBeenCalled();
  const { mount } = (
    asked.mock.calls[0]![0] as CustomEvent<{ mount: (el: HTMLElement) => () => void }>
  ).detail;
  const tab = document.createElement('div');
  mount(tab)();
  expect(tab.childElementCount).toBe(0);
  named(root(), T.popOut).click();
  await vi.waitFor(() => expect(said()).toBe(T.noPopOut));
});

test('the list of keys opens by its key', async () => {
  const { root, key } = explorer();
  await key('?');
  expect(root().querySelector('dialog')!.open).toBe(true);
});

test('without a kernel nothing can be pressed, and that is said', async () => {
  const { model, root } = explorer();
  await settled();
  (model as unknown as { fire: (name: string) => void }).fire('comm_live_update');
  expect(root().querySelector('fieldset')!.disabled).toBe(true);
  expect(root().textContent).toContain(T.gone);
});

test('what is removed follows its model no longer', async () => {
  const { dispose, select, of } = explorer();
  await settled();
  dispose();
  await select('selected', 1);
  expect(of('detail')).toEqual([]);
});
