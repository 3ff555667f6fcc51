/** Requests to the kernel and their answers, over the widget's custom messages. */
import type { AnyModel } from '@anywidget/types';
import { T } from './strings';
import type { Ops } from './wire';

export type Wait = 'idle' | 'busy' | 'dead';
export type Op = keyof Ops;
export type Args<K extends Op> = Omit<Ops[K]['request'], 'op'>;
export interface Reply<K extends Op> {
  answer: Ops[K]['answer'];
  buffers: DataView[];
}
/** Asks; an error has been shown already when it resolves to `undefined`. */
export type Ask = <K extends Op>(op: K, args: Args<K>) => Promise<Reply<K> | undefined>;

const BUSY_MS = 300;
const DEAD_MS = 10_000;

interface Pending {
  sent: number;
  done: (reply: Reply<Op> | undefined) => void;
}

export class Rpc {
  /** Views of one widget share its messages, so each counts from its own random number. */
  private next = Math.floor(Math.random() * 2 ** 40);
  private pending = new Map<number, Pending>();
  private timers = new Set<ReturnType<typeof setTimeout>>();
  private heard = 0;

  constructor(
    private model: AnyModel,
    private onWait: (wait: Wait) => void,
    private onError: (text: string) => void,
  ) {
    model.on('msg:custom', this.onMessage);
  }

  ask: Ask = <K extends Op>(op: K, args: Args<K>) =>
    new Promise<Reply<K> | undefined>(resolve => {
      const re = this.next++;
      this.pending.set(re, { sent: performance.now(), done: resolve as Pending['done'] });
      try {
        this.model.send({ op, re, ...args });
      } catch {
        this.onWait('dead'); // its channel is closed
      }
      this.checkAfter(BUSY_MS);
      this.checkAfter(DEAD_MS);
    });

  dispose(): void {
    this.model.off('msg:custom', this.onMessage);
    this.timers.forEach(clearTimeout);
    this.pending.clear();
  }

  private onMessage = (content: { re?: number | null; error?: string }, buffers?: DataView[]): void => {
    if (content.error !== undefined && typeof content.re !== 'number') this.onError(T.badMessage(content.error));
    const waiting = this.pending.get(content.re ?? -1);
    if (!waiting) return;
    this.pending.delete(content.re as number);
    this.heard = performance.now();
    this.check();
    if (content.error !== undefined) this.onError(content.error);
    waiting.done(content.error === undefined ? { answer: content as never, buffers: buffers ?? [] } : undefined);
  };

  private checkAfter(ms: number): void {
    const timer = setTimeout(() => {
      this.timers.delete(timer);
      this.check();
    }, ms + 5);
    this.timers.add(timer);
  }

  /** A kernel that answered meanwhile is slow, not gone. */
  private check(): void {
    const sent = Math.min(...[...this.pending.values()].map(waiting => waiting.sent));
    const now = performance.now();
    if (now - sent < BUSY_MS || this.pending.size === 0) this.onWait('idle');
    else this.onWait(now - Math.max(sent, this.heard) < DEAD_MS ? 'busy' : 'dead');
  }
}
