/**
 * Marks differences as expected, with a reason, and removes such marks.
 *
 * The kernel then updates all verdicts and replies with the new overview.
 */
import { button, h, swallow, uniqueId } from './dom';
import type { Ask } from './rpc';
import { SCOPES } from './strings';
import * as T from './strings';
import type { Overview, Scope } from './wire';

export interface Marking {
  ask: Ask;
  /** Called with the new overview, and what to say. */
  updated: (overview: Overview, text: string) => void;
}

export type Target = { row: number } | { finding: number };

/** A button that opens a form, which asks for the tensors to mark and the reason. */
export class MarkForm {
  readonly root: HTMLElement;
  private uid = uniqueId();
  private toggle: HTMLButtonElement;
  private comment = h('input', {
    type: 'text',
    class: 'llmdebug-comment',
    maxlength: 500,
    'aria-label': T.comment,
    placeholder: T.comment,
  });
  private scope = h(
    'select',
    { 'aria-label': T.scope },
    ...(Object.entries(SCOPES) as [Scope, string][]).map(([scope, text]) =>
      h('option', { value: scope }, text),
    ),
  );
  private form: HTMLElement;
  private sending = false;

  /** `key` identifies the button, so that it gets the focus back after an update. */
  constructor(
    private target: Target,
    key: string,
    private marking: Marking,
  ) {
    this.toggle = button(
      () => this.turn(this.form.hidden),
      {
        'aria-expanded': 'false',
        'aria-controls': this.uid,
        'data-mark': key,
        title: T.expectHint,
      },
      T.expect,
    );
    this.form = h(
      'form',
      {
        id: this.uid,
        class: 'llmdebug-expect-form',
        hidden: true,
        onsubmit: (event: Event) => void this.submit(event),
        onkeydown: (event: KeyboardEvent) => this.key(event),
      },
      'row' in target ? this.scope : null,
      this.comment,
      h('button', { class: 'llmdebug-button', type: 'submit' }, T.mark),
      button(() => this.turn(false), {}, T.cancel),
    );
    this.root = h('div', { class: 'llmdebug-expect' }, this.toggle, this.form);
  }

  /** Open or close the form. */
  turn(open: boolean): void {
    this.form.hidden = !open;
    this.toggle.setAttribute('aria-expanded', String(open));
    (open ? this.comment : this.toggle).focus();
  }

  private key(event: KeyboardEvent): void {
    if (event.key !== 'Escape') return;
    swallow(event);
    this.turn(false);
  }

  private async submit(event: Event): Promise<void> {
    swallow(event);
    if (this.sending) return;
    this.sending = true;
    const reply = await this.marking.ask('expect', {
      row: -1,
      finding: -1,
      scope: this.scope.value as Scope,
      ...this.target,
      comment: this.comment.value.trim(),
    });
    this.sending = false;
    if (reply) this.marking.updated(reply.answer, T.markedNow);
  }
}

/** A button that removes the mark at index `at` of the overview's list. */
export function unmarkButton(
  overview: Overview,
  at: number,
  key: string,
  { ask, updated }: Marking,
): HTMLElement {
  const { text, rows } = overview.marks[at]!;
  const name = T.unmark(text, rows);
  let sending = false;
  const unmark = async () => {
    if (sending) return; // a second press would be about a mark that is gone
    sending = true;
    const reply = await ask('unexpect', { mark: at, text });
    sending = false;
    if (reply) updated(reply.answer, T.unmarkedNow);
  };
  const props = { 'data-mark': key, 'aria-label': name, title: name };
  return button(() => void unmark(), props, T.unmarkFace);
}

/** The list of all marks with their reasons. */
export function markList(overview: Overview, marking: Marking): HTMLElement {
  const { marks, kept } = overview;
  return h(
    'details',
    { class: 'llmdebug-marked', 'data-open': 'marks' },
    h('summary', {}, T.marked(marks.length)),
    h(
      'ul',
      {},
      ...marks.map(({ text, comment, rows }, at) =>
        h(
          'li',
          {},
          unmarkButton(overview, at, `mark-${at}`, marking),
          ' ',
          h('code', {}, text),
          ' ',
          comment,
          ' ',
          h('span', { class: 'llmdebug-dim' }, T.markedRows(rows)),
        ),
      ),
    ),
    h('div', { class: 'llmdebug-note' }, kept ? T.keptIn(kept) : T.keptNowhere),
  );
}
