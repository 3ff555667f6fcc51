/** Answers what an explorer asks from what a page was saved with. */
import type { Link } from '../plugin/page_model';
import { T } from '../widget/strings';
import type { Ops, Row, SavedPage, Sort, TreeNode, View, Which } from '../widget/wire';
import { planes, type Values } from './values';

type Op = keyof Ops;
type Request = { [K in Op]: Ops[K]['request'] }[Op];
interface Told {
  answer: object;
  buffers?: DataView[];
}
type Narrow = Pick<
  Ops['row']['request'],
  'node' | 'mismatch' | 'text' | 'every' | 'sort' | 'descending'
>;

export class Saved implements Link {
  onMessage?: Link['onMessage'];
  private at: Map<number, number>;
  private kept: Map<string, SavedPage['answers'][number]>;
  private kids = new Map<number, TreeNode[]>();
  private report: boolean;

  constructor(private page: SavedPage) {
    this.at = new Map(page.rows.map((row, i) => [row.id, i]));
    this.kept = new Map(page.answers.map(one => [one.key, one]));
    this.report = page.snapshot.kind === 'report';
    page.nodes.forEach((node, i) =>
      this.kids.set(page.parents[i]!, [...(this.kids.get(page.parents[i]!) ?? []), node]),
    );
  }

  /** Answers come later, as a kernel's do. */
  send(content: object): void {
    const { re, ...request } = content as Request & { re: number };
    const told = this.answer(request as Request);
    queueMicrotask(() =>
      this.onMessage?.({ re, ...(told?.answer ?? { error: T.notInPage }) }, told?.buffers ?? []),
    );
  }

  private answer(request: Request): Told | undefined {
    switch (request.op) {
      case 'children':
        return { answer: this.children(request) };
      case 'path':
        return { answer: { ids: this.way(request.path) } };
      case 'rows':
        return { answer: this.rows(request) };
      case 'row':
        return this.located(this.row(request.row), request);
      case 'locate':
        return this.locate(request);
      case 'view':
      case 'heads':
        return this.planes(request) ?? this.remembered(request);
      case 'series':
        return this.remembered(request) ?? { answer: { lines: [] } }; // no curve is no loss that needs words
      default:
        return this.remembered(request);
    }
  }

  private children({ parent, start, n }: Ops['children']['request']): Ops['children']['answer'] {
    const kids = this.kids.get(parent) ?? [];
    return { total: kids.length, nodes: kids.slice(start, start + n) };
  }

  /** From a root down to the node at `path`, or to its nearest one above that there is. */
  private way(path: string): number[] {
    const module = path.split('/')[0]!.split('.');
    for (; module.length; module.pop()) {
      const found = this.page.nodes.findIndex(node => node.path === module.join('.'));
      if (found >= 0) return this.up(found).reverse();
    }
    const root = this.page.nodes.findIndex(node => node.path === '');
    return root >= 0 ? [root] : [];
  }

  private up(node: number): number[] {
    const found: number[] = [];
    for (let at = node; at >= 0; at = this.page.parents[at] ?? -1) found.push(at);
    return found;
  }

  private row(id: number): Row | undefined {
    const at = this.at.get(id);
    return at === undefined ? undefined : this.page.rows[at];
  }

  private rows({ step, start, n, ...narrow }: Ops['rows']['request']): Ops['rows']['answer'] {
    if (/(^|\s)(nan|inf)(\s|$)|[<>]|(^|\s)id:/i.test(narrow.text))
      return { total: 0, start: 0, rows: [], problem: T.wordsOnly };
    const found = this.list(narrow.every ? -1 : step, narrow);
    return { total: found.length, start, rows: found.slice(start, start + n), problem: '' };
  }

  private list(step: number, narrow: Narrow): Row[] {
    const found = this.page.rows.filter(
      (row, i) => (step < 0 || row.step === step) && this.passes(row, this.page.homes[i]!, narrow),
    );
    return narrow.sort ? sorted(found, narrow.sort, narrow.descending) : found;
  }

  private passes(row: Row, home: number, { node, mismatch, text }: Narrow): boolean {
    if (node >= 0 && !this.up(home).includes(node)) return false;
    if (
      mismatch &&
      !(this.report
        ? row.verdict === 'diverged' || row.verdict === 'unmatched'
        : row.nan || row.inf)
    )
      return false;
    const short = row.role.endsWith('input') ? 'in' : 'out';
    const shown =
      `${row.path} ${row.role}[${row.slot}] ${short}[${row.slot}] ${row.op} ${row.dtype} ${row.verdict ?? ''}`.toLowerCase();
    return text
      .toLowerCase()
      .split(/\s+/)
      .every(word => shown.includes(word));
  }

  private located(row: Row | undefined, narrow: Narrow): Told | undefined {
    return (
      row && {
        answer: { row, index: this.list(narrow.every ? -1 : row.step, narrow).indexOf(row) },
      }
    );
  }

  private locate({ row, delta, ...narrow }: Ops['locate']['request']): Told {
    const found = this.list(-1, narrow);
    const at = found.findIndex(one => one.id === row);
    const next =
      at >= 0
        ? found[at + delta]
        : delta > 0
          ? found.find(one => one.id > row)
          : found.reverse().find(one => row < 0 || one.id < row);
    return this.located(next, narrow) ?? { answer: { row: null, index: -1 } };
  }

  private planes(request: Ops['view']['request'] | Ops['heads']['request']): Told | undefined {
    const values = this.values(request.row, request.which);
    return values && planes(values, request);
  }

  private values(row: number, which: Which): Values | undefined {
    const kept = this.kept.get(`array ${row} ${which}`);
    return (
      kept && {
        shape: kept.answer.shape as number[],
        data: new Float32Array(bytes(kept.buffers[0]!)),
      }
    );
  }

  private remembered(request: Request): Told | undefined {
    const kept = this.kept.get(key(request));
    if (!kept || (request.op === 'view' && !isWhole(request, kept.answer as unknown as View)))
      return undefined;
    return { answer: kept.answer, buffers: kept.buffers.map(text => new DataView(bytes(text))) };
  }
}

/** By a column, those without a value last, and else as they were. */
function sorted(rows: Row[], by: Exclude<Sort, ''>, descending: boolean): Row[] {
  const value = (row: Row): number | string | null =>
    by === 'shape' ? row.shape.join('x') : row[by];
  const compare = (a: number | string, b: number | string): number => (a < b ? -1 : a > b ? 1 : 0);
  return [...rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    return x === null || y === null
      ? Number(x === null) - Number(y === null)
      : compare(x, y) * (descending ? -1 : 1);
  });
}

/** As `saved_page.py` says it. */
function key(request: Request): string {
  const { op, row, finding, which, axes, fixed } = request as unknown as Record<
    string,
    number | string | number[]
  >;
  return [op, row, finding, which, axes, fixed].filter(part => part !== undefined).join(' ');
}

/** A window of a slice that is not held whole is not in the page. */
function isWhole({ y0, x0, y1, x1 }: Ops['view']['request'], { rows, cols }: View): boolean {
  return y0 === 0 && x0 === 0 && (y1 === 0 || y1 === rows) && (x1 === 0 || x1 === cols);
}

function bytes(text: string): ArrayBuffer {
  return Uint8Array.from(atob(text), char => char.charCodeAt(0)).buffer;
}
