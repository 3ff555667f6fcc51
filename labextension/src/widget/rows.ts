/** The list of records: filtered and sorted by the kernel, fetched in pages. */
import { columnsOf, nextOrder, type Order } from './columns';
import { button, clamp, h, swallow, uniqueId } from './dom';
import { figure, pathText, shapeText, shortPath, shortSlot, shortType, slotText } from './format';
import { verdictBadge } from './header';
import { Pages } from './pages';
import type { Ask } from './rpc';
import * as T from './strings';
import { VirtualList } from './virtual';
import type { ListColumn, Listed, Located, Page, Row, TreeNode } from './wire';

const ROW = 24;
const PAGE = 200;
const TYPING_MS = 200;
const SCROLLING_MS = 40;
const CHARACTER = 6.95;
const LEAST_PATH = 160;

/** Filter and order of the list, which are part of every request about it. */
export type Filter = Listed;
/** All records of a step, in execution order. */
export const WHOLE: Filter = {
  node: -1,
  mismatch: false,
  text: '',
  every: false,
  sort: '',
  descending: false,
};

const RANK = /\brank:(\d+)\b/i;

export interface RowsEvents {
  choose: (row: Row) => void;
  clearNode: () => void;
  /** The user changed the filter. */
  narrowed: () => void;
}

export class Rows {
  readonly root: HTMLElement;
  private columns: ListColumn[] = [];
  private head = h('div', {
    class: 'llmdebug-record llmdebug-head',
    role: 'row',
    'aria-rowindex': 1,
  });
  private order: Order = { sort: '', descending: false };
  private list: VirtualList;
  private pages = new Pages<Row>(PAGE, () => Promise.resolve(undefined));
  private uid = uniqueId();
  private step = 0;
  private node: TreeNode | null = null;
  private selected = -1;
  private index = -1;
  private taken = 0;
  private typing = 0;
  private scrolling = 0;
  private text = h('input', {
    type: 'text',
    class: 'llmdebug-filter',
    placeholder: T.filterHint,
    title: T.filterHelp,
    'aria-label': T.filter,
    oninput: () => this.typed(),
  });
  private rank = h('select', {
    class: 'llmdebug-rank',
    'aria-label': T.rank,
    onchange: () => this.chooseRank(),
  });
  private mismatch = h('input', {
    type: 'checkbox',
    class: 'llmdebug-mismatches',
    onchange: () => this.narrow(),
  });
  private every = h('input', {
    type: 'checkbox',
    class: 'llmdebug-every',
    onchange: () => this.span(),
  });
  private chip = h('button', { type: 'button', class: 'llmdebug-chip', title: T.clearNode });
  private total = h('span', { class: 'llmdebug-dim llmdebug-total' });

  constructor(
    private ask: Ask,
    private report: boolean,
    private ranks: number[],
    private stepLabel: (index: number) => string,
    private events: RowsEvents,
  ) {
    this.list = new VirtualList({
      item: ROW,
      head: this.head,
      render: i => this.line(i),
      painted: () => this.fetchInView(),
    });
    this.chip.addEventListener('click', () => this.events.clearNode());
    const grid = this.list.root;
    grid.setAttribute('role', 'grid');
    grid.setAttribute('aria-label', T.records);
    this.arrange();
    grid.addEventListener('click', event => this.click(event));
    grid.addEventListener('keydown', event => this.key(event));
    this.rank.append(
      h('option', { value: '' }, T.everyRank),
      ...ranks.map(rank => h('option', { value: rank }, T.ofRank(rank))),
    );
    this.root = h(
      'section',
      { class: 'llmdebug-rows', 'aria-label': T.records },
      h(
        'div',
        { class: 'llmdebug-bar' },
        this.text,
        ranks.length ? this.rank : null,
        report ? h('label', {}, this.mismatch, T.mismatches) : null,
        report ? h('label', { title: T.everyHint }, this.every, T.every) : null,
        this.chip,
        this.total,
      ),
      grid,
    );
  }

  /** The list leaves records out. */
  get isFiltered(): boolean {
    return this.node !== null || this.mismatch.checked || this.text.value.trim() !== '';
  }

  get filter(): Filter {
    return {
      node: this.node?.id ?? -1,
      mismatch: this.mismatch.checked,
      text: this.text.value,
      every: this.every.checked,
      ...this.order,
    };
  }

  /** True if the list contains the records of a step. */
  shows(step: number): boolean {
    return this.every.checked || step === this.step;
  }

  show(step: number, node: TreeNode | null): void {
    const same = this.every.checked && node === this.node && step !== this.step;
    this.step = step;
    if (same) return; // the list holds all steps
    this.node = node;
    this.chip.hidden = node === null;
    this.chip.textContent = node ? `${T.under(pathText(node.path))} ✕` : '';
    this.reload();
  }

  /** Return a record and its place in this list. */
  async where(row: number): Promise<Located | undefined> {
    return (await this.ask('row', { row, ...this.filter }))?.answer;
  }

  /** True if the list already shows this record as selected. */
  has(id: number): boolean {
    return id === this.selected && this.index >= 0;
  }

  select(id: number, index: number): void {
    this.selected = id;
    this.index = index;
    // the record's page may still be on its way
    if (index >= 0 && this.list.count <= index) this.list.setCount(index + 1);
    if (index >= 0) this.list.reveal(index);
    else this.list.refresh();
  }

  /** Select the first record of the list. */
  start(): void {
    if (this.list.count > 0) void this.take(0);
  }

  begin({ mismatch, text }: Pick<Filter, 'mismatch' | 'text'>): void {
    this.mismatch.checked = mismatch;
    this.text.value = text;
  }

  clearFilter(): void {
    this.text.value = '';
    this.mismatch.checked = false;
  }

  dispose(): void {
    clearTimeout(this.typing);
    clearTimeout(this.scrolling);
    this.list.dispose();
  }

  /** Fetch the list again, after the verdicts have changed. */
  refresh(): void {
    this.reload(this.list.root.scrollTop);
  }

  private span(): void {
    this.arrange();
    this.narrow();
  }

  private sortBy(column: ListColumn): void {
    this.order = nextOrder(this.order, column);
    this.arrange();
    this.head.querySelector<HTMLElement>(`[data-sort=${column.name}]`)?.focus();
    this.reload(); // from the top, wherever the selected record is
  }

  private arrange(): void {
    this.columns = columnsOf(this.report, this.every.checked, this.ranks.length > 0);
    const { style } = this.list.root;
    style.setProperty(
      '--llmdebug-columns',
      this.columns.map(c => (c.width ? `${c.width}px` : `minmax(${LEAST_PATH}px, 1fr)`)).join(' '),
    );
    style.setProperty('--llmdebug-least', `${this.fixedWidth + LEAST_PATH}px`);
    this.head.replaceChildren(...this.columns.map(column => this.heading(column)));
  }

  /** The rank is a part of the typed filter: the choice writes it there. */
  private chooseRank(): void {
    const others = this.text.value.split(/\s+/).filter(part => part && !RANK.test(part));
    const rank = this.rank.value === '' ? [] : [`rank:${this.rank.value}`];
    this.text.value = [...others, ...rank].join(' ');
    this.narrow();
  }

  private typed(): void {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.narrow(), TYPING_MS);
  }

  private narrow(): void {
    const ranks = [...this.text.value.matchAll(new RegExp(RANK, 'gi'))];
    this.rank.value = ranks.length === 1 ? ranks[0]![1]! : '';
    this.reload();
    this.events.narrowed();
  }

  private reload(scroll = 0): void {
    const { step } = this;
    const filter = this.filter;
    this.index = -1;
    const pages = new Pages<Row>(PAGE, async (start, n) => {
      const answer = (await this.ask('rows', { step, ...filter, start, n }))?.answer;
      if (pages === this.pages) this.tell(answer);
      return answer && { total: answer.total, items: answer.rows };
    });
    this.pages = pages;
    this.list.root.scrollTop = scroll;
    const first = Math.max(0, this.list.first);
    void this.fetch(scroll ? first : 0, scroll ? Math.max(first + 1, this.list.last) : 1);
  }

  /** Say why the list is empty: the filter may be invalid, or the kernel answered with an error. */
  private tell(page: Page | undefined): void {
    this.text.setAttribute('aria-invalid', String(Boolean(page?.problem)));
    this.list.root.dataset.none = page ? page.problem || T.noRecords : T.unreadable;
  }

  private async fetch(first: number, last: number): Promise<void> {
    const pages = this.pages;
    if (!(await pages.load(first, last)) || pages !== this.pages) return;
    this.total.textContent = T.count(pages.total);
    this.list.root.setAttribute('aria-rowcount', String(pages.total + 1));
    this.list.root.classList.toggle('llmdebug-none', pages.total === 0);
    this.list.setCount(pages.total);
  }

  /** Fetch the pages in view once the scrolling stops. */
  private fetchInView(): void {
    clearTimeout(this.scrolling);
    const { first, last } = this.list;
    if (last > first) this.scrolling = setTimeout(() => void this.fetch(first, last), SCROLLING_MS);
    this.list.root.setAttribute(
      'aria-activedescendant',
      this.index >= 0 ? `${this.uid}-${this.index}` : '',
    );
  }

  private get fixedWidth(): number {
    return this.columns.reduce((sum, column) => sum + column.width, 0);
  }

  private heading(column: ListColumn): HTMLElement {
    const { name, title, number } = column;
    const { sort, descending } = this.order;
    const props = { role: 'columnheader', class: number ? 'llmdebug-number' : '' };
    if (!this.report) return h('span', props, title);
    const order = sort !== name ? 'none' : descending ? 'descending' : 'ascending';
    const arrow = h('span', { 'aria-hidden': 'true' }, descending ? ' ▾' : ' ▴');
    const face = button(
      () => this.sortBy(column),
      { class: 'llmdebug-sort', 'data-sort': name, title: T.sortBy(title) },
      title,
      order === 'none' ? null : arrow,
    );
    return h('span', { ...props, 'aria-sort': order }, face);
  }

  private line(i: number): HTMLElement {
    const row = this.pages.at(i);
    const selected = row !== undefined && row.id === this.selected;
    if (selected) this.index = i;
    const bad = row?.verdict === 'diverged' ? ' llmdebug-is-bad' : '';
    const unkept = row && !row.kept ? ' llmdebug-unkept' : '';
    return h(
      'div',
      {
        class: `llmdebug-record${bad}${unkept}`,
        role: 'row',
        id: `${this.uid}-${i}`,
        style: `height:${ROW}px`,
        'aria-rowindex': i + 2,
        'aria-selected': String(selected),
        'data-row': row?.id,
      },
      ...this.columns.map(column => (row ? this.cell(row, column) : cell('', '…'))),
    );
  }

  private cell(row: Row, { name, number }: ListColumn): HTMLElement {
    if (name === 'path') return this.pathCell(row);
    if (name === 'step') return cell(this.stepLabel(row.step), this.stepLabel(row.step));
    if (name === 'verdict') {
      const why = row.expected ? `: ${row.expected}` : '';
      return cell(row.expected || row.reason, row.verdict && verdictBadge(row.verdict), why);
    }
    if (name === 'which') return cell(row.differing, row.which);
    if (name === 'shape') return cell(shapeText(row.shape), row.shape.join('×') || T.scalar);
    const text = String(row[name] ?? '');
    if (!number) return cell(text, name === 'dtype' ? shortType(text) : text);
    const shown = cell(text, figure(row[name], 3));
    shown.className = 'llmdebug-number';
    return shown;
  }

  private pathCell(row: Row): HTMLElement {
    const slot = shortSlot(row);
    const width = Math.max(LEAST_PATH, this.list.root.clientWidth - this.fixedWidth);
    const broken = T.notFinite(row.nan, row.inf).join(' ');
    const taken = slot.length + 1 + (broken ? broken.length + 2 : 0);
    const path = shortPath(row.path, this.node?.path ?? '', (width - 8) / CHARACTER - taken);
    return cell(
      `${pathText(row.path)} ${slotText(row)}\n${row.kept ? T.kept : T.notKept}`,
      broken ? h('span', { class: 'llmdebug-badge' }, broken) : null,
      h('span', { class: 'llmdebug-path' }, path),
      ' ',
      h('span', { class: 'llmdebug-slot' }, slot),
    );
  }

  private click(event: MouseEvent): void {
    if ((event.target as HTMLElement).closest('.llmdebug-head')) return;
    const index = this.list.indexAt(event);
    if (index >= 0) void this.take(index);
  }

  private async take(index: number): Promise<void> {
    const { pages } = this;
    const taken = ++this.taken;
    const row = await pages.want(index);
    if (!row || pages !== this.pages || taken !== this.taken) return;
    this.select(row.id, index);
    this.events.choose(row);
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || this.head.contains(event.target as Node))
      return;
    const last = this.list.count - 1;
    const moves: Record<string, number> = {
      ArrowDown: this.index + 1,
      ArrowUp: this.index - 1,
      Home: 0,
      End: last,
      PageDown: this.index + this.list.page,
      PageUp: this.index - this.list.page,
    };
    const to = moves[event.key];
    if (to === undefined) return;
    swallow(event);
    if (last >= 0) void this.take(clamp(to, 0, last));
  }
}

function cell(title: string, ...children: (Node | string | null)[]): HTMLElement {
  return h('span', { role: 'gridcell', title: title || undefined }, ...children);
}
