/** Sends numbered requests and gives each reply to whoever asked. */
import type { Args, Operations, Reply, ReplyMessage } from './messages';

/** A request without a reply yet. */
export interface Pending {
  readonly message: object;
  /** The number of each time that it was sent. */
  readonly numbers: number[];
  /** In milliseconds of `performance.now()`. */
  readonly asked: number;
  readonly resolve: (reply: never) => void;
  readonly reject: (error: Error) => void;
}

export class Client<Ops extends Operations<Ops>> {
  private requests = new Set<Pending>();

  /** `first`: the number of the first request. */
  constructor(
    private transmit: (message: object) => void,
    private first = 1,
  ) {}

  /** The requests without a reply, the oldest first. */
  get pending(): readonly Pending[] {
    return [...this.requests];
  }

  /** Rejects with the other end's error message, or with what `transmit` throws. */
  ask<K extends keyof Ops>(op: K, args: Args<Ops, K>): Promise<Reply<Ops, K>> {
    return new Promise((resolve, reject) => {
      const message = { op, ...args };
      const request = { message, numbers: [], asked: performance.now(), resolve, reject };
      this.send(request);
      this.requests.add(request);
    });
  }

  /** Send a request, possibly again. A reply to any of its numbers answers it. */
  send(request: Pending): void {
    const re = this.first++;
    request.numbers.push(re);
    this.transmit({ ...request.message, re });
  }

  /** Deliver a reply. Return false if it answers no pending request. */
  receive(message: ReplyMessage, buffers: DataView[]): boolean {
    const request = this.pending.find(({ numbers }) => numbers.includes(message.re ?? -1));
    if (!request) return false;
    this.requests.delete(request);
    if (message.error !== undefined) request.reject(new Error(message.error));
    else request.resolve({ answer: message, buffers } as never);
    return true;
  }

  /** Reject all pending requests. */
  fail(error: Error): void {
    this.requests.forEach(({ reject }) => reject(error));
    this.requests.clear();
  }

  /** Drop all pending requests: their promises never settle. */
  clear(): void {
    this.requests.clear();
  }
}
