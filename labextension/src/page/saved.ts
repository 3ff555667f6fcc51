/** Answers an explorer's requests from the data in a saved page. */
import type { Connection } from '../protocol/messages';
import * as T from '../widget/strings';
import {
  LIST_COLUMNS,
  type Listed,
  type Ops,
  type Row,
  type SavedPage,
  type Sort,
  type TreeNode,
  type View,
  type Which,
} from '../widget/wire';
import { planes, type Values } from './values';

type Request = Ops[keyof Ops]['request'];
interface Answered {
  answer: object;
  buffers?: DataView[];
}

/** Filters that need the kernel: `nan`, `inf`, comparisons, and execution ids. */
const FIGURES = /(^|\s)(nan|inf)(\s|$)|[<>]|(^|\s)id:/i;

const RANK = /^rank:\d+$/;
const SEARCHED = LIST_COLUMNS.filter(column => column.searched);

export class Saved implements Connection {
  onMessage?: Connection['onMessage'];
  private at: Map<number, number>;
  private kept: Map<string, SavedPage['answers'][number]>;
  private kids = new Map<number, TreeNode[]>();
  private report: boolean;

  constructor(private page: SavedPage) {
    this.at = new Map(page.rows.map((row, i) => [row.id, i]));
    this.kept = new Map(page.answers.map(one => [one.key, one]));
    this.report = page.snapshot.kind === 'report';
    page.nodes.forEach((node, i) => {
      const parent = page.parents[i]!;
      this.kids.set(parent, [...(this.kids.get(parent) ?? []), node]);
    });
  }

  /** Reply in a microtask: replies are asynchronous, as from a kernel. */
  send(message: object): void {
    const { re, ...request } = message as Request & { re: number };
    const { answer, buffers = [] } = this.answer(request) ?? { answer: { error: T.notInPage } };
    queueMicrotask(() => this.onMessage?.({ re, ...answer }, buffers));
  }

  private answer(request: Request): Answered | undefined {
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
        return this.planes(request) ?? this.recorded(request);
      case 'series': // missing curves need no message
        return this.recorded(request) ?? { answer: { lines: [] } };
      case 'calls': // nor do missing calls
        return this.recorded(request) ?? { answer: { cells: [], total: 0 } };
      default:
        return this.recorded(request);
    }
  }

  private children({ parent, start, n }: Ops['children']['request']): Ops['children']['answer'] {
    const kids = this.kids.get(parent) ?? [];
    return { total: kids.length, nodes: kids.slice(start, start + n) };
  }

  /** Return the nodes from a root to the one at `path`, or to its nearest existing ancestor. */
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

  private rows({ step, start, n, ...listed }: Ops['rows']['request']): Ops['rows']['answer'] {
    if (FIGURES.test(listed.text)) return { total: 0, start: 0, rows: [], problem: T.wordsOnly };
    const rows = this.list(listed.every ? -1 : step, listed);
    return { total: rows.length, start, rows: rows.slice(start, start + n), problem: '' };
  }

  private list(step: number, listed: Listed): Row[] {
    const { rows, homes } = this.page;
    const passing = rows.filter(
      (row, i) => (step < 0 || row.step === step) && this.passes(row, homes[i]!, listed),
    );
    return listed.sort ? sorted(passing, listed.sort, listed.descending) : passing;
  }

  private passes(row: Row, home: number, { node, mismatch, text }: Listed): boolean {
    if (node >= 0 && !this.up(home).includes(node)) return false;
    if (mismatch && !this.isMismatch(row)) return false;
    const { path, rank, role, slot } = row;
    const short = role.endsWith('input') ? 'in' : 'out';
    const cells = SEARCHED.map(({ name }) => row[name] ?? '');
    const shown = [path, `${role}[${slot}]`, `${short}[${slot}]`, ...cells].join(' ');
    const parts = text.toLowerCase().split(/\s+/);
    const ranks = parts.filter(part => RANK.test(part));
    const words = parts.filter(part => !RANK.test(part));
    if (ranks.length && !ranks.includes(`rank:${rank}`)) return false;
    return words.every(word => shown.toLowerCase().includes(word));
  }

  private isMismatch({ verdict, nan, inf }: Row): boolean {
    return this.report ? verdict === 'diverged' || verdict === 'unmatched' : nan + inf > 0;
  }

  private located(row: Row | undefined, listed: Listed): Answered | undefined {
    if (!row) return undefined;
    const index = this.list(listed.every ? -1 : row.step, listed).indexOf(row);
    return { answer: { row, index } };
  }

  private locate({ row, delta, ...listed }: Ops['locate']['request']): Answered {
    const rows = this.list(-1, listed);
    const at = rows.findIndex(one => one.id === row);
    let next: Row | undefined;
    if (at >= 0) next = rows[at + delta];
    else if (delta > 0) next = rows.find(one => one.id > row);
    else next = rows.reverse().find(one => row < 0 || one.id < row);
    return this.located(next, listed) ?? { answer: { row: null, index: -1 } };
  }

  private planes(request: Ops['view']['request'] | Ops['heads']['request']): Answered | undefined {
    const values = this.values(request.row, request.which);
    return values && planes(values, request);
  }

  /** Return a tensor that the page holds as a whole. */
  private values(row: number, which: Which): Values | undefined {
    const kept = this.kept.get(`array ${row} ${which}`);
    if (!kept) return undefined;
    const data = new Float32Array(bytes(kept.buffers[0]!));
    return { shape: kept.answer.shape as number[], data };
  }

  /** Return the answer that the kernel gave to this request when the page was saved. */
  private recorded(request: Request): Answered | undefined {
    const kept = this.kept.get(key(request));
    if (!kept || (request.op === 'view' && !isWhole(request, kept.answer as unknown as View)))
      return undefined;
    return { answer: kept.answer, buffers: kept.buffers.map(text => new DataView(bytes(text))) };
  }
}

/** Sort by a column. Equal rows keep their order; rows without a value come last. */
function sorted(rows: Row[], by: Exclude<Sort, ''>, descending: boolean): Row[] {
  const sign = descending ? -1 : 1;
  const value = (row: Row) => (by === 'shape' ? row.shape.join('x') : row[by]);
  return [...rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return Number(x === null) - Number(y === null);
    return x < y ? -sign : x > y ? sign : 0;
  });
}

/** Return the key of a recorded answer, in the form that saved_page.py writes. */
function key(request: Request): string {
  const parts = { ...request } as Record<string, number | string | number[] | undefined>;
  const { op, row, finding, layer, step, which, axes, fixed } = parts;
  return [op, row, finding, layer, step, which, axes, fixed]
    .filter(part => part !== undefined)
    .join(' ');
}

/** True if the request is for a whole slice: the page has no answers for windows. */
function isWhole({ y0, x0, y1, x1 }: Ops['view']['request'], { rows, cols }: View): boolean {
  return y0 === 0 && x0 === 0 && (y1 === 0 || y1 === rows) && (x1 === 0 || x1 === cols);
}

function bytes(text: string): ArrayBuffer {
  return Uint8Array.from(atob(text), char => char.charCodeAt(0)).buffer;
}
