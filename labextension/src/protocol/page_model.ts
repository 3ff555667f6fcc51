/** Stands in for an anywidget model: traits that live in the page, messages over a connection. */
import type { AnyModel } from '@anywidget/types';
import type { Connection } from './messages';

type Listener = (...args: never[]) => void;

export class PageModel {
  private listeners = new Map<string, Set<Listener>>();

  constructor(
    private traits: Record<string, unknown>,
    private connection: Connection,
  ) {
    connection.onMessage = (message, buffers) => this.fire('msg:custom', message, buffers);
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

  send(message: object): void {
    this.connection.send(message);
  }

  save_changes(): void {}

  asModel(): AnyModel {
    return this as unknown as AnyModel;
  }

  private fire(name: string, ...args: unknown[]): void {
    [...(this.listeners.get(name) ?? [])].forEach(listener => listener(...(args as never[])));
  }
}
