/** Requests to the kernel and their replies, over the widget's custom messages. */
import type { AnyModel } from '@anywidget/types';
import { Client, type Pending } from '../protocol/client';
import type * as protocol from '../protocol/messages';
import * as T from './strings';
import type { Ops } from './wire';

/** `dead`: no reply for a long time. `gone`: the kernel was restarted or shut down. */
export type Wait = 'idle' | 'busy' | 'dead' | 'gone';
export type Op = keyof Ops;
export type Args<K extends Op> = protocol.Args<Ops, K>;
export type Reply<K extends Op> = protocol.Reply<Ops, K>;
/** Ask the kernel. Resolves to `undefined` after an error, which has been shown by then. */
export type Ask = <K extends Op>(op: K, args: Args<K>) => Promise<Reply<K> | undefined>;

const BUSY_MS = 300;
const DEAD_MS = 10_000;
const PROBE_MS = 1_000;
const TRIES = 3;

export class Rpc {
  /** All views of a widget receive all its messages, so each numbers from a random start. */
  private client = new Client<Ops>(
    message => this.transmit(message),
    Math.floor(Math.random() * 2 ** 40),
  );
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

  ask: Ask = async <K extends Op>(op: K, args: Args<K>) => {
    const reply = this.client.ask(op, args);
    const request = this.client.pending.at(-1)!;
    this.after(BUSY_MS + 5, () => this.check());
    this.after(DEAD_MS + 5, () => this.check());
    this.after(PROBE_MS, () => this.probe(request, PROBE_MS));
    try {
      return await reply;
    } catch (error) {
      this.onError((error as Error).message);
      return undefined;
    }
  };

  get idle(): boolean {
    return this.client.pending.length === 0;
  }

  dispose(): void {
    this.model.off('msg:custom', this.onMessage);
    this.model.off('comm_live_update', this.onClosed);
    this.timers.forEach(clearTimeout);
    this.client.clear();
  }

  private onMessage = (message: protocol.ReplyMessage, buffers: DataView[] = []): void => {
    const { re, error } = message;
    if (typeof re !== 'number' && error !== undefined) this.onError(T.badMessage(error));
    this.gone = false;
    if (typeof re !== 'number' || !this.client.receive(message, buffers)) return;
    this.heard = performance.now();
    this.resendOvertaken(re);
    this.check();
  };

  /** The widget manager never opens a closed channel again. */
  private onClosed = (): void => {
    this.gone = true;
    this.check();
  };

  private transmit(message: object): void {
    try {
      this.model.send(message);
    } catch {
      this.onClosed();
    }
  }

  /**
   * Send again what was sent before request `re`, which the kernel has answered.
   *
   * Messages to one shell of the kernel keep their order. Messages sent before Jupyter opens a
   * subshell for widgets wait for the running cell; messages to a subshell that is gone are lost.
   */
  private resendOvertaken(re: number): void {
    for (const request of this.client.pending)
      if (request.numbers.at(-1)! < re && request.numbers.length < TRIES) this.client.send(request);
  }

  /** While `request` is the oldest, probe with a cheap one, at doubling intervals. */
  private probe(request: Pending, ms: number): void {
    if (!this.client.pending.includes(request)) return;
    if (this.client.pending[0] === request) void this.ask('path', { path: '' });
    this.after(2 * ms, () => this.probe(request, 2 * ms));
  }

  private after(ms: number, then: () => void): void {
    const timer = setTimeout(() => {
      this.timers.delete(timer);
      then();
    }, ms);
    this.timers.add(timer);
  }

  /** Report how long the kernel has kept us waiting. After any reply it is slow, not dead. */
  private check(): void {
    const now = performance.now();
    const waited = now - (this.client.pending[0]?.asked ?? now);
    if (this.gone) this.onWait('gone');
    else if (waited < BUSY_MS) this.onWait('idle');
    else this.onWait(Math.min(waited, now - this.heard) < DEAD_MS ? 'busy' : 'dead');
  }
}
