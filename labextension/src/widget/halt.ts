/** Where a program is halted: the line, why, what agrees, and the buttons to go on. */
import { openLine } from './answer';
import type { Say } from './copy';
import { button, h } from './dom';
import type { Ask } from './rpc';
import * as T from './strings';
import type { Command, HaltView, Overview } from './wire';

export interface HaltEvents {
  /** Show the function that the program is halted in. */
  show: (halt: HaltView) => void;
  /** The program went on: show where it halts now. */
  updated: (overview: Overview, text: string) => void;
  say: Say;
}

export class Halt {
  readonly root = h('div', { class: 'llmdebug-answer llmdebug-halt' });

  /** `focus`: the command whose button had the focus at the halt before. */
  constructor(
    private ask: Ask,
    private events: HaltEvents,
    private focus = '',
  ) {
    void this.load();
  }

  /** Return the command whose button has the focus; "" if none has. */
  get focused(): string {
    const { activeElement } = this.root.getRootNode() as Document | ShadowRoot;
    const at = this.root.contains(activeElement) ? activeElement : null;
    return at?.getAttribute('data-key') ?? this.focus;
  }

  private async load(): Promise<void> {
    const reply = await this.ask('halt', {});
    if (!reply) return;
    this.draw(reply.answer);
    this.events.show(reply.answer);
  }

  private draw(halt: HaltView): void {
    const lines: [string, string][] = [
      [T.why, halt.why],
      [T.outputs, halt.tensors],
      [T.rest, halt.rest],
    ];
    this.root.replaceChildren(
      h(
        'div',
        { class: 'llmdebug-answer-head' },
        h(
          'h2',
          {},
          h('span', { 'aria-hidden': 'true' }, halt.ended ? '■' : '‖'),
          ` ${halt.head} `,
          h('code', {}, halt.place),
          halt.where.startsWith(halt.place)
            ? halt.where.slice(halt.place.length)
            : ` · ${halt.where}`,
        ),
        h('div', { class: 'llmdebug-actions' }, ...this.actions(halt)),
      ),
      h(
        'dl',
        { class: 'llmdebug-reasons' },
        ...lines
          .filter(([, text]) => text)
          .flatMap(([name, text]) => [h('dt', {}, name), h('dd', { title: text }, text)]),
      ),
    );
    if (this.focus) this.root.querySelector<HTMLElement>(`[data-key='${this.focus}']`)?.focus();
    this.focus = '';
  }

  private actions({ file, line, commands }: HaltView): HTMLElement[] {
    const open = () => openLine(this.root, file, line, this.events.say);
    const opener = file ? [button(open, { title: T.openTitle }, T.open)] : [];
    return [...opener, ...commands.map(command => this.runner(command))];
  }

  /** A button that lets the program go on; it may run for as long as the model does. */
  private runner({ name, effect, can }: Command): HTMLElement {
    const run = async () => {
      this.focus = name;
      this.disable(true);
      this.events.say(T.running(name));
      const reply = await this.ask('step', { command: name });
      this.disable(false);
      if (reply) this.events.updated(reply.answer, '');
      else this.root.querySelector<HTMLElement>(`[data-key='${name}']`)?.focus();
    };
    const props = { class: 'llmdebug-button llmdebug-runner', 'data-key': name, title: effect };
    return button(() => void run(), { ...props, disabled: !can }, name);
  }

  private disable(disabled: boolean): void {
    for (const each of this.root.querySelectorAll<HTMLButtonElement>('.llmdebug-runner')) {
      if (disabled && !each.disabled) each.dataset.can = '';
      if ('can' in each.dataset) each.disabled = disabled;
    }
  }
}
