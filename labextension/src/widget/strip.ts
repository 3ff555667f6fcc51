/** The calls of one layer at one token, in execution order. Only calls in view are in the DOM. */
import { classOf } from './cells';
import { h, swallow } from './dom';
import { figure, pathText } from './format';
import { DIVERGED, MADE, type LayerErrors, type Place } from './layererrors';
import type { Ask } from './rpc';
import { STATES } from './strings';
import * as T from './strings';
import { VirtualList } from './virtual';
import type { CallCell, Row } from './wire';

const WIDTH = 96;
const MOST = 1000;

export interface StripEvents {
  choose: (row: number) => void;
  tell: (text: string) => void;
}

export class Strip {
  readonly root: HTMLElement;
  private name = h('span', { class: 'llmdebug-strip-name' });
  private list: VirtualList;
  private cells: CallCell[] = [];
  private key = '';
  private at = -1;
  /** The selected row, whose call is marked. */
  private row: Pick<Row, 'id' | 'path'> | null = null;

  constructor(
    private ask: Ask,
    private events: StripEvents,
  ) {
    this.list = new VirtualList({
      item: WIDTH,
      horizontal: true,
      render: i => this.cell(i),
      painted: had => had && this.focus(),
    });
    this.list.root.removeAttribute('tabindex');
    this.root = h(
      'div',
      {
        class: 'llmdebug-strip',
        role: 'toolbar',
        'aria-label': T.strip,
        onkeydown: (event: KeyboardEvent) => this.press(event),
      },
      this.name,
      this.list.root,
    );
  }

  /** Show the calls of a layer at a token. */
  async show(place: Place, errors: LayerErrors): Promise<void> {
    const key = `${place.layer} ${place.step} ${errors.serial}`;
    if (key === this.key) return;
    this.key = key;
    const reply = await this.ask('calls', { layer: place.layer, step: place.step, n: MOST });
    if (key !== this.key) return;
    if (!reply) {
      this.key = ''; // to be asked for again
      return;
    }
    const { cells, total } = reply.answer;
    this.cells = cells;
    const more = total > cells.length ? ` ${T.firstOf(cells.length, total)}` : '';
    this.name.textContent = errors.shortName(place.layer) + more;
    this.name.title = errors.name(place.layer);
    this.root.hidden = cells.length === 0;
    this.at = this.callOf(this.row);
    if (this.at < 0) this.at = cells.findIndex(cell => cell.state === MADE);
    if (this.at < 0) this.at = cells.findIndex(cell => cell.state === DIVERGED);
    this.list.setCount(cells.length);
    if (this.at >= 0) this.list.reveal(this.at);
  }

  /** Mark the call of a row, now and in the calls that are on their way. */
  point(row: Row): void {
    if (row.id === this.row?.id) return;
    this.row = row;
    this.at = this.callOf(row);
    if (this.at >= 0) this.list.reveal(this.at);
    else this.list.refresh();
  }

  /** Return the index of a row's call, -1 if it is not among these. */
  private callOf(row: Strip['row']): number {
    if (!row) return -1;
    const exact = this.cells.findIndex(cell => cell.row === row.id);
    return exact >= 0 ? exact : this.cells.findIndex(cell => cell.path === row.path);
  }

  dispose(): void {
    this.list.dispose();
  }

  private cell(i: number): HTMLElement {
    const { label, path, state, error, limit, differing } = this.cells[i]!;
    const figures = error === null ? '' : `, ${T.errorLimit(figure(error, 3), figure(limit, 3))}`;
    const which = differing ? `, ${differing}` : '';
    const says = `${pathText(path)}: ${STATES[state]}${figures}${which}`;
    const mark = state === MADE ? ' ✗' : state === DIVERGED ? ' ⤵' : '';
    return h(
      'button',
      {
        class: `llmdebug-call ${classOf(state)}`,
        type: 'button',
        style: `width:${WIDTH - 2}px`,
        tabindex: i === Math.max(this.at, 0) ? 0 : -1,
        'aria-current': i === this.at ? 'true' : undefined,
        'aria-label': says,
        title: says,
        onclick: () => this.choose(i),
        onpointerenter: () => this.events.tell(says),
      },
      h('span', {}, pathText(label)),
      mark ? h('b', {}, mark) : null,
    );
  }

  private choose(i: number): void {
    const { row, path } = this.cells[i]!;
    this.at = i;
    this.row = { id: row, path };
    this.list.refresh();
    this.events.choose(row);
  }

  private press(event: KeyboardEvent): void {
    const to: Record<string, number> = {
      ArrowLeft: this.at - 1,
      ArrowRight: this.at + 1,
      Home: 0,
      End: this.cells.length - 1,
    };
    const at = to[event.key];
    if (at === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    swallow(event);
    if (!this.cells[at]) return;
    this.at = at;
    this.list.reveal(at);
    this.focus();
  }

  /** Focus the marked call: a repaint replaces the button that had the focus. */
  private focus(): void {
    this.list.root.querySelector<HTMLElement>('[tabindex="0"]')?.focus({ preventScroll: true });
  }
}
