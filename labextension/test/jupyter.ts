/** Fakes of JupyterLab's parts: its packages need a browser. Those of Lumino are the real ones. */
import { CommandRegistry } from '@lumino/commands';
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';
import { vi } from 'vitest';
import { strings } from '../src/plugin/strings';
import type { RunRow, RunsFolder } from '../src/plugin/wire';

const filled = (text: string, ...values: unknown[]) =>
  text.replace(/%(\d)/g, (_, at: string) => String(values[Number(at) - 1]));

/** A translator that leaves the texts as they are. */
export const BUNDLE = {
  __: filled,
  _n: (one: string, many: string, n: number, ...more: unknown[]) =>
    filled(n === 1 ? one : many, n, ...more),
};
/** The texts of the extension in English. */
export const t = strings(BUNDLE as never);

class LabIcon {
  readonly name: string;
  readonly svgstr: string;

  constructor({ name, svgstr }: { name: string; svgstr: string }) {
    this.name = name;
    this.svgstr = svgstr;
  }
}

class MainAreaWidget extends Widget {
  static ids = 0;
  readonly content: Widget;
  readonly toolbar = { hide: () => undefined };

  constructor({ content }: { content: Widget }) {
    super();
    this.content = content;
    this.id = `tab-${++MainAreaWidget.ids}`;
    this.node.append(content.node);
  }
}

class WidgetTracker {
  readonly widgets: Widget[] = [];
  find = (test: (one: Widget) => boolean) => this.widgets.find(test);
  add = (one: Widget) => Promise.resolve(void this.widgets.push(one));
}

/** What stands in for the packages of JupyterLab. */
export const ui = { LabIcon };
export const apputils = {
  MainAreaWidget,
  WidgetTracker,
  ICommandPalette: 'palette',
  Dialog: {
    cancelButton: (button: object) => ({ ...button, accept: false }),
    warnButton: (button: object) => ({ ...button, accept: true }),
  },
  showDialog: vi.fn((dialog: { body: string }) => {
    void dialog;
    return Promise.resolve({ button: { accept: true } });
  }),
};

export function shell() {
  const widgets: Widget[] = [];
  const made = {
    current: null as Widget | null,
    get currentWidget(): Widget | null {
      return made.current;
    },
    currentChanged: new Signal<object, void>({}),
    widgets: () => widgets.values(),
    add: vi.fn((one: Widget, area: string, options?: object) => {
      void options;
      if (area !== 'left') widgets.push(one);
    }),
    activateById: vi.fn(),
  };
  return made;
}

/** An application with real commands. Cast it to what is needed of it. */
export function app() {
  return { commands: new CommandRegistry(), shell: shell(), serviceManager: {} };
}

export function run(path: string, more: Partial<RunRow> = {}): RunRow {
  return {
    ...{ kind: 'run', name: path, path, place: `runs/${path}`, created: 0, bytes: 1000 },
    ...{ records: 4, steps: 2, state: 'complete', problem: '' },
    ...{ model: '', verdict: '', against: '' },
    ...more,
  };
}

export function folder(...runs: RunRow[]): RunsFolder {
  return { kind: 'run', folder: 'runs', runs };
}

/** A promise that the test settles. */
export function later<T>() {
  let resolve!: (value: T) => void;
  let reject!: (error: Error) => void;
  const promise = new Promise<T>((yes, no) => ([resolve, reject] = [yes, no]));
  return { promise, resolve, reject };
}
