/** The messages between the front end and a kernel, or a saved page in place of a kernel. */

/** What a map of operations must look like: the `Ops` of a generated `wire.ts`. */
export type Operations<Ops> = { [K in keyof Ops]: { request: { op: K }; answer: object } };

/** What a request of operation `K` carries besides its name. */
export type Args<Ops extends Operations<Ops>, K extends keyof Ops> = Omit<Ops[K]['request'], 'op'>;

export interface Reply<Ops extends Operations<Ops>, K extends keyof Ops> {
  answer: Ops[K]['answer'];
  buffers: DataView[];
}

/** A reply as it is sent: the fields of the answer, or `error`. `re` is the request's number. */
export interface ReplyMessage {
  re?: number | null;
  error?: string;
}

/** Carries messages to a kernel, or to a saved page in its place, and back. */
export interface Connection {
  onMessage?: (message: ReplyMessage, buffers: DataView[]) => void;
  /** Throws if the connection is closed. */
  send(message: object): void;
}
