/** The status line: messages, and whether the kernel responds. */
import { h } from './dom';
import type { Wait } from './rpc';
import * as T from './strings';

export class Status {
  readonly root: HTMLElement;
  private message = h('span', { class: 'llmdebug-message' });
  private waiting = h('span', { class: 'llmdebug-waiting' });

  constructor() {
    this.root = h('div', { class: 'llmdebug-status', role: 'status' }, this.message, this.waiting);
  }

  say(text: string): void {
    this.message.textContent = text;
    this.root.classList.remove('llmdebug-failed');
  }

  fail(text: string): void {
    this.say(text);
    this.root.classList.add('llmdebug-failed');
  }

  wait(wait: Wait): void {
    this.waiting.textContent = { idle: '', busy: T.busy, dead: T.dead, gone: T.gone }[wait];
  }
}
