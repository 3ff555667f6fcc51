/** Requests to the kernel and their replies, over a comm. */
import type { Kernel } from '@jupyterlab/services';
import type { JSONObject } from '@lumino/coreutils';
import { Client } from '../protocol/client';
import type { Args, Connection, ReplyMessage } from '../protocol/messages';
import type { Ops } from './wire';

export class Channel implements Connection {
  /** Receives replies that answer no request of this channel: an explorer numbers its own. */
  onMessage?: Connection['onMessage'];
  private client = new Client<Ops>(message => this.send(message));
  private closed = false;

  /** `gone`: the error message once the comm is closed. */
  constructor(
    private comm: Kernel.IComm,
    private gone: string,
  ) {
    comm.onMsg = ({ content, buffers = [] }) => this.receive(content.data, buffers.map(bytes));
    comm.onClose = () => this.close();
    comm.open();
  }

  get isOpen(): boolean {
    return !this.closed && !this.comm.isDisposed;
  }

  async ask<K extends keyof Ops>(op: K, args: Args<Ops, K>): Promise<Ops[K]['answer']> {
    return (await this.client.ask(op, args)).answer;
  }

  send(message: object): void {
    if (!this.isOpen) throw new Error(this.gone);
    this.comm.send(message as JSONObject);
  }

  /** Reject the pending requests: the kernel will not answer them. */
  close(): void {
    this.closed = true;
    this.client.fail(new Error(this.gone));
  }

  dispose(): void {
    if (this.isOpen) this.comm.close();
    this.close();
  }

  private receive(message: ReplyMessage, buffers: DataView[]): void {
    if (!this.client.receive(message, buffers)) this.onMessage?.(message, buffers);
  }
}

function bytes(buffer: ArrayBuffer | ArrayBufferView): DataView {
  if (!ArrayBuffer.isView(buffer)) return new DataView(buffer);
  return new DataView(buffer.buffer, buffer.byteOffset, buffer.byteLength);
}
