/** Requests to the kernel and their answers, over the widget's custom messages. */
import type { AnyModel } from '@anywidget/types';
import { T } from './strings';
import type { Ops } from './wire';

/** `dead`: no answer for long. `gone`: the channel is closed, as after a restart of the kernel. */
export type Wait = 'idle' | 'busy' | 'dead' | 'gone';
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
const PROBE_MS = 1_000;
const TRIES = 3;

interface Pending {
  message: object;
  /** One per try: which one is answered tells what it overtook. */
  numbers: number[];
  asked: number;
  done: (reply: Reply<Op> | undefined) => void;
}

export class Rpc {
  /** Views of one widget share its messages, so each counts from its own random number. */
  private next = Math.floor(Math.random() * 2 ** 40);
  private pending = new Set<Pending>();
  private timers = new Set<ReturnType<typeof setTimeout>>();
  private heard = 0;
  private gone = false;

  constructor(
    private model: AnyModel,
    private onWait: (wait: Wait) => void,
    private onError: (text: string) => void,
  ) {
    model.on('msg:custom', this.onMessage);
    model.on('comm_live_update', this.onClosed);
  }

  ask: Ask = <K extends Op>(op: K, args: Args<K>) =>
    new Promise<Reply<K> | undefined>(resolve => {
      const waiting: Pending = {
        message: { op, ...args },
        numbers: [],
        asked: performance.now(),
        done: resolve as Pending['done'],
      };
      this.pending.add(waiting);
      this.send(waiting);
      this.after(BUSY_MS + 5, () => this.check());
      this.after(DEAD_MS + 5, () => this.check());
      this.after(PROBE_MS, () => this.probe(waiting, PROBE_MS));
    });

  get idle(): boolean {
    return this.pending.size === 0;
  }

  dispose(): void {
    this.model.off('msg:custom', this.onMessage);
    this.model.off('comm_live_update', this.onClosed);
    this.timers.forEach(clearTimeout);
    this.pending.clear();
  }

  private onMessage = (
    content: { re?: number | null; error?: string },
    buffers?: DataView[],
  ): void => {
    if (content.error !== undefined && typeof content.re !== 'number')
      this.onError(T.badMessage(content.error));
    this.gone = false;
    const re = content.re ?? -1;
    const waiting = [...this.pending].find(one => one.numbers.includes(re));
    if (!waiting) return;
    this.pending.delete(waiting);
    this.heard = performance.now();
    this.resendOvertaken(re);
    this.check();
    if (content.error !== undefined) this.onError(content.error);
    waiting.done(
      content.error === undefined
        ? { answer: content as never, buffers: buffers ?? [] }
        : undefined,
    );
  };

  /** The widget manager's event: a channel that was closed is never opened again. */
  private onClosed = (): void => {
    this.gone = true;
    this.check();
  };

  private send(waiting: Pending): void {
    const re = this.next++;
    waiting.numbers.push(re);
    try {
      this.model.send({ ...waiting.message, re });
    } catch {
      this.onClosed();
    }
  }

  /**
   * Messages to one shell of the kernel keep their order. Those sent before Jupyter has a subshell
   * for widgets wait for the running cell, and those to a subshell that is gone are lost.
   */
  private resendOvertaken(re: number): void {
    for (const waiting of this.pending)
      if (waiting.numbers.at(-1)! < re && waiting.numbers.length < TRIES) this.send(waiting);
  }

  /** Ask something cheap, ever more seldom, to learn whether the oldest question is slow or was overtaken. */
  private probe(waiting: Pending, ms: number): void {
    if (!this.pending.has(waiting)) return;
    const [oldest] = this.pending;
    if (waiting === oldest) void this.ask('path', { path: '' });
    this.after(2 * ms, () => this.probe(waiting, 2 * ms));
  }

  private after(ms: number, then: () => void): void {
    const timer = setTimeout(() => {
      this.timers.delete(timer);
      then();
    }, ms);
    this.timers.add(timer);
  }

  /** A kernel that answered meanwhile is slow, not gone. */
  private check(): void {
    const asked = Math.min(...[...this.pending].map(waiting => waiting.asked));
    const now = performance.now();
    if (this.gone) this.onWait('gone');
    else if (now - asked < BUSY_MS || this.pending.size === 0) this.onWait('idle');
    else this.onWait(now - Math.max(asked, this.heard) < DEAD_MS ? 'busy' : 'dead');
  }
}
