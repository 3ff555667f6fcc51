/** Fakes that several tests share: a kernel, a canvas, sizes on the screen, keys, answers. */
import { vi } from 'vitest';
import type { Args, Ask, Op, Reply } from '../src/widget/rpc';
import {
  LIST_COLUMNS,
  type Detail,
  type Overview,
  type Row,
  type Side,
  type Step,
  type Which,
} from '../src/widget/wire';

/** An answer with buffers. */
class Sent {
  constructor(
    readonly answer: object,
    readonly buffers: DataView[],
  ) {}
}

export function sent(answer: object, ...buffers: ArrayBufferView[]): Sent {
  const view = ({ buffer, byteOffset, byteLength }: ArrayBufferView) =>
    new DataView(buffer, byteOffset, byteLength);
  return new Sent(answer, buffers.map(view));
}

/** What the kernel answers to each op; undefined is an error, which was shown by then. */
export type Answers = { [K in Op]?: (args: Args<K>) => object | undefined };

/** Answers by op, at once or, while it is `held`, when the test says so. */
export class Kernel {
  held = false;
  private asked: { op: Op; args: unknown }[] = [];
  private waiting: (() => void)[] = [];

  constructor(private answers: Answers) {}

  ask: Ask = async <K extends Op>(op: K, args: Args<K>) => {
    this.asked.push({ op, args });
    const answer = this.answers[op]?.(args);
    const reply = answer instanceof Sent ? answer : answer && new Sent(answer, []);
    if (this.held) await new Promise<void>(go => this.waiting.push(go));
    return reply as unknown as Reply<K> | undefined;
  };

  /** The arguments of each request of this op. */
  of<K extends Op>(op: K): Args<K>[] {
    return this.asked.filter(one => one.op === op).map(one => one.args as Args<K>);
  }

  /** Send the held replies in this order; all of them, the last one first, if it is not given. */
  async reply(...order: number[]): Promise<void> {
    const waiting = this.waiting.splice(0);
    const all = waiting.map((_, i) => waiting.length - 1 - i);
    for (const at of order.length ? order : all) {
      waiting[at]!();
      await settled();
    }
    this.waiting.unshift(...waiting.filter((_, i) => order.length && !order.includes(i)));
  }
}

/** Wait until all that is under way without a timer has happened. */
export function settled(): Promise<void> {
  return new Promise(resolve => setTimeout(resolve));
}

/** Press a key. The returned event tells whether it was handled. */
export function press(target: Element, key: string, more: KeyboardEventInit = {}): KeyboardEvent {
  const init = { key, bubbles: true, cancelable: true, composed: true, ...more };
  const event = new KeyboardEvent('keydown', init);
  target.dispatchEvent(event);
  return event;
}

export function texts(root: Element, selector: string): (string | null)[] {
  return [...root.querySelectorAll(selector)].map(one => one.textContent);
}

/** Return the button with this text or this name. */
export function named(root: Element, name: string): HTMLButtonElement {
  return [...root.querySelectorAll('button')].find(
    one => one.textContent === name || one.getAttribute('aria-label') === name,
  )!;
}

/** Give every element this size, as the tests have no layout. */
export function sized(width: number, height: number): void {
  for (const [name, size] of [
    ['clientWidth', width],
    ['clientHeight', height],
  ] as const)
    vi.spyOn(HTMLElement.prototype, name, 'get').mockReturnValue(size);
  const box = { left: 0, top: 0, width, height, right: width, bottom: height, x: 0, y: 0 };
  vi.spyOn(HTMLElement.prototype, 'getBoundingClientRect').mockReturnValue(box as DOMRect);
}

/** A call of a canvas context, with the styles that it had. */
export interface Drawn {
  name: string;
  args: unknown[];
  fill: unknown;
  alpha: unknown;
}

/** Make all canvases draw into one list, which is returned. */
export function drawing(): Drawn[] {
  const drawn: Drawn[] = [];
  const styles: Record<string, unknown> = {};
  const context = new Proxy(styles, {
    get: (_, name: string) =>
      name in styles
        ? styles[name]
        : (...args: unknown[]) =>
            void drawn.push({ name, args, fill: styles.fillStyle, alpha: styles.globalAlpha }),
  });
  vi.spyOn(HTMLCanvasElement.prototype, 'getContext').mockReturnValue(context as never);
  return drawn;
}

/** The pixels that were last put on a canvas, as words of four bytes. */
export function pixels(drawn: Drawn[]): number[] {
  const put = drawn.filter(one => one.name === 'putImageData').at(-1)!;
  return [...new Uint32Array((put.args[0] as ImageData).data.buffer)];
}

export function step(index: number, more: Partial<Step> = {}): Step {
  const kind = index ? 'decode' : 'prefill';
  const label = `${index} ${kind}`;
  return {
    ...{ index, generation: 0, step: index, kind, label, text: '', requests: [], rows: 4, bad: 0 },
    ...more,
  };
}

const FIGURES = LIST_COLUMNS.filter(column => column.figure).map(column => column.name);

/** A row; a figure that is not named here is null. */
export function row(id: number, more: Partial<Row> = {}): Row {
  return {
    ...Object.fromEntries(FIGURES.map(name => [name, null])),
    ...{ id, step: 0, rank: 0, seq: id, path: `layers.${id}`, call: 0, role: 'output', slot: '0' },
    ...{ op: 'Linear', dtype: 'float32', shape: [2, 3], min: -1, max: 1, mean: 0, l2norm: 2 },
    ...{ nan: 0, inf: 0, kept: true, verdict: null, reason: '', expected: '', mark: -1 },
    ...{ which: '', differing: '' },
    ...more,
  } as Row;
}

export function side(which: Which, more: Partial<Side> = {}): Side {
  return {
    ...{ which, call_id: '', kept: true, why: '', part: '', dtype: 'float32', shape: [2, 3] },
    axes: [
      { name: 'token', size: 2 },
      { name: 'feature', size: 3 },
    ],
    ...{ device: 'cpu', min: -1, max: 1, mean: 0, l2norm: 2, nan: 0, inf: 0, zero: 0, numel: 6 },
    ...{ fingerprint: 'abc', code: '', kernel: null },
    ...more,
  };
}

export function detail(shown: Row, sides: Side[], more: Partial<Detail> = {}): Detail {
  const metrics: Detail['metrics'] = [];
  return { row: shown, sides, metrics, producer: -1, producer_label: '', flow: [], ...more };
}

export function overview(more: Partial<Overview> = {}): Overview {
  return {
    ...{ kind: 'report' as const, title: 'golden against mine', golden: 'golden', mine: 'mine' },
    ...{ verdict: 'diverged' as const, caution: '', lines: [], summary: '', notes: [] },
    ...{ steps: [step(0), step(1)], findings: [], marks: [], kept: '', first_bad: -1, ranks: [] },
    ...{ rows: 4, inside: false, halt: 0 },
    ...more,
  };
}
