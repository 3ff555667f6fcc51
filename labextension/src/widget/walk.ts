/** Walks from record to record, or from mismatch to mismatch, across steps. */
import type { Ask } from './rpc';
import { WHOLE, type Rows } from './rows';
import * as T from './strings';

export interface WalkEvents {
  /** The selected row, -1 for none, and the step in view. */
  here: () => { selected: number; position: number };
  go: (row: number) => void;
  say: (text: string) => void;
}

export class Walk {
  constructor(
    private ask: Ask,
    private rows: Rows,
    private report: boolean,
    private events: WalkEvents,
  ) {}

  /** Select the next (1) or previous (-1) record or mismatch of the list. */
  async on(delta: 1 | -1, mismatch: boolean): Promise<void> {
    const { here, go, say } = this.events;
    if (mismatch && !this.report) return say(T.runHasNoMismatch);
    const { selected } = here();
    const filter = this.rows.filter;
    const wanted = mismatch || filter.mismatch;
    const row = await this.from(delta);
    if (selected !== here().selected) return; // another one was selected meanwhile
    if (row < 0 && (!mismatch || filter.sort)) return this.rows.start();
    const reply = await this.ask('locate', { ...filter, row, delta, mismatch: wanted });
    if (!reply || selected !== here().selected) return;
    if (reply.answer.row) go(reply.answer.row.id);
    else say(T.noFurther(wanted, this.rows.isFiltered));
  }

  /** Return the row to walk from: the selected one, or the edge of the step if it is elsewhere. */
  private async from(delta: 1 | -1): Promise<number> {
    const { selected, position } = this.events.here();
    const at = selected < 0 ? undefined : await this.rows.where(selected);
    if (!at?.row || this.rows.shows(at.row.step)) return selected;
    if (this.rows.filter.sort) return -1;
    const page = await this.ask('rows', { ...WHOLE, step: position, start: 0, n: 1 });
    const first = page?.answer.rows[0]?.id;
    if (first === undefined) return selected;
    return delta > 0 ? first - 1 : first;
  }
}
