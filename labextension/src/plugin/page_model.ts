/** What the explorer's code takes for its widget's model: traits that live in the page, messages over a channel. */
import type { AnyModel } from '@anywidget/types';

/** The other end of the messages: a kernel's channel, or a file. */
export interface Link {
  onMessage?: (content: object, buffers: DataView[]) => void;
  send(content: object): void;
}

type Listener = (...args: never[]) => void;

export class PageModel {
  private listeners = new Map<string, Set<Listener>>();

  constructor(
    private traits: Record<string, unknown>,
    private channel: Link,
  ) {
    channel.onMessage = (content, buffers) => this.fire('msg:custom', content, buffers);
  }

  get(name: string): unknown {
    return this.traits[name];
  }

  set(name: string, value: unknown): void {
    if (this.traits[name] === value) return;
    this.traits[name] = value;
    this.fire(`change:${name}`);
  }

  on(name: string, listener: Listener): void {
    this.listeners.set(name, (this.listeners.get(name) ?? new Set()).add(listener));
  }

  off(name: string, listener: Listener): void {
    this.listeners.get(name)?.delete(listener);
  }

  send(content: object): void {
    this.channel.send(content);
  }

  save_changes(): void {}

  asModel(): AnyModel {
    return this as unknown as AnyModel;
  }

  private fire(name: string, ...args: unknown[]): void {
    [...(this.listeners.get(name) ?? [])].forEach(listener => listener(...(args as never[])));
  }
}
