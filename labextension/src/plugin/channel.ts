/** Requests to the kernel and their answers, over a comm. */
import type { Kernel } from '@jupyterlab/services';
import type { JSONObject } from '@lumino/coreutils';
import type { Ops } from './wire';

export type Op = keyof Ops;
type Content = { re?: number; error?: string };

interface Waiting {
  resolve: (answer: never) => void;
  reject: (error: Error) => void;
}

export class Channel {
  /** Gets what answers no request of this channel: the explorer numbers its own. */
  onMessage?: (content: object, buffers: DataView[]) => void;
  private next = 1;
  private waiting = new Map<number, Waiting>();
  private over = false;

  constructor(
    private comm: Kernel.IComm,
    private gone: string,
  ) {
    comm.onMsg = message => this.hear(message.content.data as Content, message.buffers ?? []);
    comm.onClose = () => this.close();
    comm.open();
  }

  get isOpen(): boolean {
    return !this.over && !this.comm.isDisposed;
  }

  ask<K extends Op>(op: K, args: Omit<Ops[K]['request'], 'op'>): Promise<Ops[K]['answer']> {
    return new Promise((resolve, reject) => {
      const re = this.next++;
      this.send({ op, ...args, re }); // what it throws rejects the promise
      this.waiting.set(re, { resolve: resolve as Waiting['resolve'], reject });
    });
  }

  /** Throws when nobody is there to hear it. */
  send(content: object): void {
    if (!this.isOpen) throw new Error(this.gone);
    this.comm.send(content as JSONObject);
  }

  /** Nobody will answer any more. */
  close(): void {
    this.over = true;
    this.waiting.forEach(({ reject }) => reject(new Error(this.gone)));
    this.waiting.clear();
  }

  dispose(): void {
    if (this.isOpen) this.comm.close();
    this.close();
  }

  private hear(content: Content, buffers: (ArrayBuffer | ArrayBufferView)[]): void {
    const waiting = this.waiting.get(content.re ?? -1);
    if (!waiting) {
      this.onMessage?.(content, buffers.map(bytes));
      return;
    }
    this.waiting.delete(content.re!);
    if (content.error === undefined) waiting.resolve(content as never);
    else waiting.reject(new Error(content.error));
  }
}

function bytes(buffer: ArrayBuffer | ArrayBufferView): DataView {
  return ArrayBuffer.isView(buffer)
    ? new DataView(buffer.buffer, buffer.byteOffset, buffer.byteLength)
    : new DataView(buffer);
}
