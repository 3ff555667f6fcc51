/** Marks what differs as expected, with a comment, and takes that back. What is judged anew comes back as the overview. */
import { h, swallow, uniqueId } from './dom';
import type { Ask } from './rpc';
import { SCOPES, T } from './strings';
import type { Overview, Scope } from './wire';

export interface Judged {
  ask: Ask;
  /** What to do with the new overview. */
  took: (overview: Overview) => void;
}

export type Target = { row: number } | { finding: number };

/** A button that opens a form: which tensors, and why. */
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

  /** `key`: where the focus goes back to once all is judged anew. */
  constructor(
    private target: Target,
    key: string,
    private judged: Judged,
  ) {
    this.toggle = h(
      'button',
      {
        class: 'llmdebug-button',
        type: 'button',
        'aria-expanded': 'false',
        'aria-controls': this.uid,
        'data-mark': key,
        title: T.expectHint,
        onclick: () => this.turn(this.form.hidden),
      },
      T.expect,
    );
    this.form = h(
      'form',
      {
        id: this.uid,
        class: 'llmdebug-expect-form',
        hidden: true,
        onsubmit: (event: Event) => this.submit(event),
        onkeydown: (event: KeyboardEvent) => this.key(event),
      },
      'row' in target ? this.scope : null,
      this.comment,
      h('button', { class: 'llmdebug-button', type: 'submit' }, T.mark),
      h(
        'button',
        { class: 'llmdebug-button', type: 'button', onclick: () => this.turn(false) },
        T.cancel,
      ),
    );
    this.root = h('div', { class: 'llmdebug-expect' }, this.toggle, this.form);
  }

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
    const reply = await this.judged.ask('expect', {
      row: -1,
      finding: -1,
      scope: this.scope.value as Scope,
      ...this.target,
      comment: this.comment.value.trim(),
    });
    if (reply) this.judged.took(reply.answer);
  }
}

/** A button that takes back the mark at a place of the overview's list. */
export function unmarkButton(
  overview: Overview,
  at: number,
  key: string,
  { ask, took }: Judged,
): HTMLElement {
  const { text, rows } = overview.marks[at]!;
  const name = T.unmark(text, rows);
  return h(
    'button',
    {
      class: 'llmdebug-button',
      type: 'button',
      'data-mark': key,
      'aria-label': name,
      title: name,
      onclick: () => void unmark(),
    },
    T.unmarkFace,
  );

  async function unmark(): Promise<void> {
    const reply = await ask('unexpect', { mark: at, text });
    if (reply) took(reply.answer);
  }
}

/** All that is marked, with what was said of it. */
export function markList(overview: Overview, judged: Judged): HTMLElement {
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
          unmarkButton(overview, at, `mark-${at}`, judged),
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
