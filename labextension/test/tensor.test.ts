// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { Tensor } from '../src/widget/tensor';
import type { Axis, Side } from '../src/widget/wire';
import {
  detail,
  drawing,
  Kernel,
  named,
  press,
  row,
  sent,
  settled,
  side,
  sized,
  texts,
} from './fakes';

beforeEach(() => {
  drawing();
  sized(60, 40);
});
afterEach(() => void vi.restoreAllMocks());

const axes = (...sizes: number[]): Axis[] => sizes.map(size => ({ name: '', size }));
const three = (more: Partial<Side> = {}): Side[] =>
  (['golden', 'mine', 'difference'] as const).map(which =>
    side(which, { shape: [4, 2, 3], axes: axes(4, 2, 3), ...more }),
  );

function tensor(report = true, worst: Record<number, number[]> = { 1: [2, 1, 0], 2: [3, 0, 0] }) {
  const kernel = new Kernel({
    view: ({ y0, x0, y1, x1 }) => {
      const [y2, x2] = [y1 || 2, x1 || 3];
      const [h, w] = [y2 - y0, x2 - x0];
      const place = { h, w, fy: 1, fx: 1, y0, x0, y1: y2, x1: x2, rows: 2, cols: 3 };
      return sent({ ...place, lo: 0, hi: 1 }, new Float32Array(h * w).fill(0.5));
    },
    worst: ({ row: id }) => {
      const index = worst[id];
      const one = { golden: 1, mine: 2, difference: 1 };
      return { elements: index ? [{ index, ...one }] : [], differing: 1 };
    },
    histogram: () => ({ lo: 0, hi: 1, counts: [1], nan: 0, inf: 0, total: 1 }),
  });
  const made = new Tensor(kernel.ask, report);
  document.body.replaceChildren(made.root, made.figures);
  const show = async (id: number, sides: Side[]) => {
    made.show(detail(row(id), sides));
    await settled();
  };
  const tab = () => made.root.querySelector('[role=tab][aria-selected=true]')?.textContent;
  const panel = () => made.root.querySelector('[role=tabpanel]')!;
  return { made, kernel, show, tab, panel };
}

test('each side has a tab; a comparison begins with all of them side by side', async () => {
  const { made, kernel, show, tab, panel } = tensor();
  await show(1, three());
  expect(texts(made.root, '[role=tab]')).toEqual(['golden', 'mine', 'difference', 'side by side']);
  expect(tab()).toBe('side by side');
  expect(new Set(kernel.of('view').map(one => one.which))).toEqual(
    new Set(['golden', 'mine', 'difference']),
  );
  expect(named(made.root, 'mine').getAttribute('aria-controls')).toBe(panel().id);
});

test('a run has no tabs, and shows its only side with its histogram', async () => {
  const { made, kernel, show, panel } = tensor(false);
  await show(1, [side('golden')]);
  expect(made.root.querySelector<HTMLElement>('[role=tablist]')!.hidden).toBe(true);
  expect(panel().querySelector('.llmdebug-heatmap, .llmdebug-histogram')).not.toBeNull();
  expect(kernel.of('histogram')[0]).toMatchObject({ row: 1, which: 'golden' });
  expect(kernel.of('worst')).toEqual([]);
});

test('tabs are walked through by arrow keys, in a circle, and keep the focus', async () => {
  const { made, show, tab } = tensor();
  await show(1, three());
  const list = made.root.querySelector('[role=tablist]')!;
  press(list, 'ArrowRight');
  expect([tab(), document.activeElement!.textContent]).toEqual(['golden', 'golden']);
  press(list, 'ArrowLeft');
  press(list, 'ArrowLeft');
  expect(tab()).toBe('difference');
  expect(texts(made.root, '[role=tab][tabindex="0"]')).toEqual(['difference']);
  expect(press(list, 'ArrowDown').defaultPrevented).toBe(false);
});

test('the side that was chosen stays from tensor to tensor, if it was kept', async () => {
  const { made, show, tab } = tensor();
  await show(1, three());
  named(made.root, 'mine').click();
  await show(2, three());
  expect(tab()).toBe('mine');
  await show(3, [side('golden')]);
  expect(made.look.which).toBe('golden');
  await show(2, three());
  expect(tab()).toBe('mine');
});

test('a side whose values were not kept says why', async () => {
  const { made, kernel, show, panel } = tensor();
  const why = 'only statistics: <b>';
  const [golden, mine, difference] = three({ kept: false, why });
  await show(1, [{ ...golden!, kept: true }, mine!, difference!]);
  named(made.root, 'mine').click();
  const line = made.root.querySelector<HTMLElement>('.llmdebug-why')!;
  expect([line.hidden, line.textContent, panel().querySelector('b')]).toEqual([false, why, null]);
  expect(made.root.querySelector<HTMLElement>('.llmdebug-values')!.hidden).toBe(true);
  expect(kernel.of('worst')).toEqual([]);
});

test('sides of different shapes are not shown side by side', async () => {
  const { made, show } = tensor();
  const [golden, mine, difference] = three();
  await show(1, [golden!, { ...mine!, shape: [8, 3] }, difference!]);
  expect(texts(made.root, '[role=tab]')).not.toContain('side by side');
});

test('a comparison opens at the slice of the worst element', async () => {
  const { made, kernel, show } = tensor();
  await show(1, three());
  expect(made.look).toMatchObject({ axes: [1, 2], fixed: [2, 1, 0] });
  expect(kernel.of('view').every(one => one.fixed[0] === 2)).toBe(true);
});

test('a state that was saved has its side and slice back, once', async () => {
  const { made, show } = tensor();
  made.begin({ which: 'mine', axes: [0, 2], fixed: [0, 1, 0] });
  await show(1, three());
  expect(made.look).toEqual({ which: 'mine', axes: [0, 2], fixed: [0, 1, 0] });
});

test('a worst element is shown in all pictures', async () => {
  const { made, kernel, show } = tensor();
  await show(1, three());
  named(made.root.parentElement!, '[2, 1, 0]').click();
  await settled();
  const marks = kernel.of('view').filter(one => one.size === 1);
  expect(marks.map(one => [one.which, one.y0, one.x0])).toEqual([
    ['golden', 1, 0],
    ['mine', 1, 0],
    ['difference', 1, 0],
  ]);
  expect(texts(made.root, '.llmdebug-value')).toContain('[2, 1, 0] = 0.5');
});

test('if the layouts differ, a worst element belongs to the difference', async () => {
  const { made, show, tab } = tensor();
  const [golden, mine, difference] = three();
  await show(1, [golden!, { ...mine!, shape: [8, 3], axes: axes(8, 3) }, difference!]);
  named(made.root, 'mine').click();
  named(made.root.parentElement!, '[2, 1, 0]').click();
  expect(tab()).toBe('difference');
});

test('the side chosen while the worst element was on its way is the one shown', async () => {
  const { made, kernel, show, tab } = tensor();
  await show(1, three());
  kernel.held = true;
  made.show(detail(row(2), three()));
  named(made.root, 'golden').click();
  kernel.held = false;
  await kernel.reply();
  expect([tab(), made.look.fixed]).toEqual(['golden', [3, 0, 0]]);
});

test('until then, slices and sides are those of the tensor before', async () => {
  const { made, kernel, show } = tensor();
  await show(1, three());
  kernel.held = true;
  made.show(detail(row(2), three({ shape: [9, 4, 2, 3], axes: axes(9, 4, 2, 3) })));
  named(made.root, 'golden').click();
  expect(kernel.of('view').at(-1)).toMatchObject({ row: 1, fixed: [2, 1, 0] });
  kernel.held = false;
  await kernel.reply();
  expect(kernel.of('view').at(-1)).toMatchObject({ row: 2, fixed: [0, 0, 0, 0] });
});

test('the worst element of an earlier tensor does not open it over the later one', async () => {
  const { made, kernel } = tensor();
  kernel.held = true;
  made.show(detail(row(1), three()));
  made.show(detail(row(2), three()));
  kernel.held = false;
  await kernel.reply();
  expect(made.look.fixed).toEqual([3, 0, 0]);
  expect(new Set(kernel.of('view').map(one => one.row))).toEqual(new Set([2]));
});
