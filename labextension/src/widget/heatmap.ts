/** Draws a 2-d slice of a tensor on a canvas, with zoom, pan, and the value of an element. */
import { NAN_COLOUR, Scale } from './colours';
import { clamp, h, swallow } from './dom';
import { exactFloat32, figure, numeric } from './format';
import type { Ask, Reply } from './rpc';
import * as T from './strings';
import { extreme, floats, panned, zoomed, type Cell, type Window } from './window';
import type { View, ViewRequest } from './wire';

/** A 2-d slice of a tensor, without the window that is in view. */
export type Slice = Pick<ViewRequest, 'row' | 'which' | 'axes' | 'fixed'> & {
  /** Of the axes down and across. */
  names?: [string, string];
};
export interface HeatmapEvents {
  moved?: (window: Window) => void;
  pointed?: (at: Cell | null) => void;
  picked?: (at: Cell) => void;
  drawn?: () => void;
}

const CELLS = 256;
const NUMBER_WIDTH = 40;
const NUMBER_HEIGHT = 14;
const LINE_HEIGHT = 28;
const HEIGHT = 340;
const PAN_STEP = 0.25;

export class Heatmap {
  readonly root: HTMLElement;
  private canvas = h('canvas', {
    class: 'llmdebug-canvas',
    tabindex: 0,
    role: 'img',
    title: T.hint,
  });
  private caption = h('div', { class: 'llmdebug-caption' });
  private value = h('div', { class: 'llmdebug-value', 'aria-live': 'polite', 'data-hint': T.hint });
  private low = h('span');
  private high = h('span');
  private ramp = h('span', { class: 'llmdebug-ramp' });
  private slice: Slice | null = null;
  private window: Window = { y0: 0, x0: 0, y1: 0, x1: 0 };
  view: View | null = null;
  private data = new Float32Array();
  private scale = new Scale(0, 0);
  private picture: HTMLCanvasElement | null = null;
  private picked: Cell | null = null;
  private pointed: Cell | null = null;
  private busy = false;
  private stale = false;
  /** Number of elements that were asked for: the last one is framed. */
  private asked = 0;
  private resize = new ResizeObserver(() => this.paint());

  constructor(
    private ask: Ask,
    private events: HeatmapEvents = {},
  ) {
    const legend = h(
      'div',
      { class: 'llmdebug-legend' },
      this.low,
      this.ramp,
      this.high,
      h('span', { class: 'llmdebug-swatch', style: `background:${NAN_COLOUR}` }),
      T.nan,
    );
    this.root = h(
      'figure',
      { class: 'llmdebug-heatmap' },
      this.canvas,
      legend,
      this.caption,
      this.value,
    );
    this.canvas.addEventListener('wheel', event => this.wheel(event), { passive: false });
    this.canvas.addEventListener('keydown', event => this.key(event));
    this.canvas.addEventListener('pointerdown', event => this.drag(event));
    this.canvas.addEventListener('pointermove', event => this.events.pointed?.(this.under(event)));
    this.canvas.addEventListener('pointerleave', () => this.events.pointed?.(null));
    this.resize.observe(this.canvas);
  }

  show(slice: Slice): void {
    this.slice = slice;
    this.asked++;
    this.window = { y0: 0, x0: 0, y1: 0, x1: 0 };
    this.view = null;
    this.picked = this.pointed = null;
    this.value.textContent = '';
    void this.load();
  }

  /** Show a window of the slice. */
  look(window: Window): void {
    this.window = window;
    void this.load();
  }

  /** Frame an element and show its value. A cell may cover many elements, so it is fetched. */
  async mark(at: Cell): Promise<void> {
    const slice = this.slice;
    if (!slice) return;
    const asked = ++this.asked;
    const reply = await this.ask('view', {
      ...placeOf(slice),
      y0: at.y,
      x0: at.x,
      y1: at.y + 1,
      x1: at.x + 1,
      size: 1,
    });
    if (reply && asked === this.asked) this.put(slice, at, floats(reply.buffers[0])[0]!);
  }

  /** Frame the element under the pointer, which may be in a map beside this one. */
  point(at: Cell | null): void {
    this.pointed = at;
    this.paint();
  }

  /** Return the value shown at an element: the one of its cell. */
  valueAt(at: Cell | null): number | null {
    const { view } = this;
    if (!view || !at) return null;
    return (
      this.data[
        Math.floor((at.y - view.y0) / view.fy) * view.w + Math.floor((at.x - view.x0) / view.fx)
      ] ?? null
    );
  }

  /** Describe an element: its index in the whole tensor, and how many elements its cell covers. */
  where(at: Cell): string {
    const { slice, view } = this;
    if (!slice || !view) return '';
    return `[${this.index(slice, at).join(', ')}]${T.cells(view.fy, view.fx)}`;
  }

  /** Map the colours to `lo` … `hi` in place of the slice's own range. */
  paintBetween(lo: number, hi: number, signed = false): void {
    this.colour(new Scale(lo, hi, signed));
    this.paint();
  }

  dispose(): void {
    this.resize.disconnect();
  }

  /** Fetch the slice: one request at a time, then another one if the window changed meanwhile. */
  private async load(): Promise<void> {
    if (this.busy) {
      this.stale = true;
      return;
    }
    this.setBusy(true);
    do {
      this.stale = false;
      const slice = this.slice!;
      const reply = await this.ask('view', { ...placeOf(slice), ...this.window, size: CELLS });
      if (slice !== this.slice) continue;
      if (reply) this.take(reply.answer, floats(reply.buffers[0]));
      else if (!this.view) this.clear();
      else if (!this.stale) this.window = windowOf(this.view); // the last picture stays
    } while (this.stale);
    this.setBusy(false);
  }

  private setBusy(busy: boolean): void {
    this.busy = busy;
    this.canvas.setAttribute('aria-busy', String(busy));
  }

  /** Remove the picture, which shows another tensor. */
  private clear(): void {
    this.view = null;
    this.data = new Float32Array();
    this.caption.textContent = T.unreadable;
    this.canvas.setAttribute('aria-label', T.unreadable);
    this.canvas.getContext('2d')?.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.ramp.style.background = '';
    this.low.textContent = this.high.textContent = '';
  }

  private take(view: View, data: Float32Array<ArrayBuffer>): void {
    this.view = view;
    this.data = data;
    if (!this.stale) this.window = windowOf(view);
    this.colour(new Scale(numeric(view.lo), numeric(view.hi), this.slice?.which === 'difference'));
    this.canvas.style.height = `${Math.min(HEIGHT, Math.max(48, view.rows * LINE_HEIGHT))}px`;
    const flat = view.rows === 1;
    const names = this.slice?.names ?? ['rows', 'columns'];
    const range = flat
      ? T.windowFlat(names[1], view.x0, view.x1)
      : T.window(names, [view.y0, view.y1, view.x0, view.x1]);
    this.caption.textContent = data.length
      ? view.rows * view.cols === 1
        ? T.scalar
        : range + T.cells(view.fy, view.fx)
      : T.empty;
    this.canvas.setAttribute(
      'aria-label',
      `${T.heatmap(view.rows, view.cols)}, ${this.caption.textContent}`,
    );
    this.paint();
    this.events.drawn?.();
  }

  private colour(scale: Scale): void {
    this.scale = scale;
    this.picture = null;
    this.ramp.style.background = scale.gradient;
    this.low.textContent = figure(scale.lo, 3);
    this.high.textContent = figure(scale.hi, 3);
  }

  private paint(): void {
    const { view, canvas } = this;
    const context = canvas.getContext('2d');
    if (!view || !context || canvas.clientWidth === 0) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    if (this.data.length === 0) return;
    context.imageSmoothingEnabled = false;
    this.picture ??= this.image(view);
    context.drawImage(this.picture, 0, 0, canvas.width, canvas.height);
    context.scale(ratio, ratio);
    this.numbers(context, view);
    for (const at of [this.picked, this.pointed]) if (at) this.frame(context, view, at);
  }

  private image(view: View): HTMLCanvasElement {
    const image = h('canvas', { width: view.w, height: view.h });
    const pixels = new ImageData(view.w, view.h);
    const words = new Uint32Array(pixels.data.buffer);
    for (let i = 0; i < words.length; i++) words[i] = this.scale.word(this.data[i]!);
    image.getContext('2d')!.putImageData(pixels, 0, 0);
    return image;
  }

  private numbers(context: CanvasRenderingContext2D, view: View): void {
    const width = this.canvas.clientWidth / view.w;
    const height = this.canvas.clientHeight / view.h;
    const shown = width >= NUMBER_WIDTH && height >= NUMBER_HEIGHT;
    this.canvas.dataset.numbers = String(shown);
    if (!shown) return;
    context.textAlign = 'center';
    context.textBaseline = 'middle';
    context.font = `${width < 56 ? 10 : 11}px ${getComputedStyle(this.canvas).fontFamily}`;
    this.data.forEach((value, i) => {
      context.fillStyle = this.scale.ink(value);
      context.fillText(
        figure(value, 3),
        ((i % view.w) + 0.5) * width,
        (Math.floor(i / view.w) + 0.5) * height,
        width - 2,
      );
    });
  }

  private frame(context: CanvasRenderingContext2D, view: View, at: Cell): void {
    const width = this.canvas.clientWidth / view.w;
    const height = this.canvas.clientHeight / view.h;
    const x = Math.floor((at.x - view.x0) / view.fx) * width;
    const y = Math.floor((at.y - view.y0) / view.fy) * height;
    const grow = Math.max(0, 6 - Math.min(width, height)) / 2; // or a frame would hide a tiny cell
    for (const [colour, line] of [
      ['#000', 3],
      ['#fff', 1],
    ] as const) {
      context.strokeStyle = colour;
      context.lineWidth = line;
      context.strokeRect(x - grow, y - grow, width + 2 * grow, height + 2 * grow);
    }
  }

  private zoom(factor: number, x = 0.5, y = 0.5): void {
    if (this.view) this.move(zoomed(this.window, this.view, factor, { y, x }));
  }

  private pan(dx: number, dy: number): void {
    if (this.view) this.move(panned(this.window, this.view, dx, dy));
  }

  private move(to: Window): void {
    const at = this.window;
    if (to.y0 === at.y0 && to.y1 === at.y1 && to.x0 === at.x0 && to.x1 === at.x1) return;
    this.look(to);
    this.events.moved?.(to);
  }

  /** Zoom. At its limits, the wheel scrolls the page, so that the map does not trap it. */
  private wheel(event: WheelEvent): void {
    const before = this.window;
    const notches =
      event.deltaMode === WheelEvent.DOM_DELTA_PIXEL ? event.deltaY / 100 : event.deltaY;
    this.zoom(
      2 ** clamp(notches, -1, 1),
      event.offsetX / this.canvas.clientWidth,
      event.offsetY / this.canvas.clientHeight,
    );
    if (this.window !== before) event.preventDefault();
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.view) return;
    const width = Math.max(1, (this.window.x1 - this.window.x0) * PAN_STEP);
    const height = Math.max(1, (this.window.y1 - this.window.y0) * PAN_STEP);
    const actions: Record<string, () => void> = {
      '+': () => this.zoom(0.5),
      '=': () => this.zoom(0.5),
      '-': () => this.zoom(2),
      '0': () => this.move({ y0: 0, x0: 0, y1: this.view!.rows, x1: this.view!.cols }),
      ArrowLeft: () => this.pan(-width, 0),
      ArrowRight: () => this.pan(width, 0),
      ArrowUp: () => this.pan(0, -height),
      ArrowDown: () => this.pan(0, height),
      Enter: () => void this.pick(0.5, 0.5),
    };
    const action = actions[event.key];
    if (!action) return;
    swallow(event);
    action();
  }

  /** Pan while the pointer moves. A press without a movement picks a cell. */
  private drag(down: PointerEvent): void {
    const { canvas, view } = this;
    if (!view || down.button !== 0) return;
    const start = this.window;
    let moved = false;
    const move = (event: PointerEvent) => {
      const dx = event.clientX - down.clientX;
      const dy = event.clientY - down.clientY;
      moved ||= Math.hypot(dx, dy) > 4;
      if (!moved) return;
      this.window = start;
      this.pan(
        (-dx / canvas.clientWidth) * (start.x1 - start.x0),
        (-dy / canvas.clientHeight) * (start.y1 - start.y0),
      );
    };
    const up = () => {
      canvas.removeEventListener('pointermove', move);
      if (!moved)
        void this.pick(down.offsetX / canvas.clientWidth, down.offsetY / canvas.clientHeight);
    };
    canvas.setPointerCapture(down.pointerId);
    canvas.addEventListener('pointermove', move);
    canvas.addEventListener('lostpointercapture', up, { once: true });
  }

  /** Show the element that a cell stands for. Fetch the inside of a cell that covers many. */
  private async pick(fx: number, fy: number): Promise<void> {
    const slice = this.slice;
    if (!this.view || !slice || this.data.length === 0) return;
    const asked = ++this.asked;
    let view: View = this.view;
    let data = this.data;
    let cell =
      clamp(Math.floor(fy * view.h), 0, view.h - 1) * view.w +
      clamp(Math.floor(fx * view.w), 0, view.w - 1);
    while (view.fy * view.fx > 1) {
      const y0 = view.y0 + Math.floor(cell / view.w) * view.fy;
      const x0 = view.x0 + (cell % view.w) * view.fx;
      const block: Window = {
        y0,
        x0,
        y1: Math.min(view.y1, y0 + view.fy),
        x1: Math.min(view.x1, x0 + view.fx),
      };
      const reply: Reply<'view'> | undefined = await this.ask('view', {
        ...placeOf(slice),
        ...block,
        size: CELLS,
      });
      if (!reply || asked !== this.asked) return;
      view = reply.answer;
      data = floats(reply.buffers[0]);
      cell = extreme(data);
    }
    const at = { y: view.y0 + Math.floor(cell / view.w), x: view.x0 + (cell % view.w) };
    this.put(slice, at, data[cell]!);
    this.events.picked?.(at);
  }

  private put(slice: Slice, at: Cell, value: number): void {
    this.picked = at;
    this.value.textContent = `[${this.index(slice, at).join(', ')}] = ${exactFloat32(value)}`;
    this.paint();
  }

  /** Return the first element of the cell under the pointer. */
  private under(event: PointerEvent): Cell | null {
    const { view, canvas } = this;
    if (!view || this.data.length === 0) return null;
    const y = clamp(Math.floor((event.offsetY / canvas.clientHeight) * view.h), 0, view.h - 1);
    const x = clamp(Math.floor((event.offsetX / canvas.clientWidth) * view.w), 0, view.w - 1);
    return { y: view.y0 + y * view.fy, x: view.x0 + x * view.fx };
  }

  /** Return an element's index in the whole tensor. */
  private index(slice: Slice, at: Cell): number[] {
    const [row, column] = slice.axes;
    return slice.fixed.map((fixed, axis) => (axis === row ? at.y : axis === column ? at.x : fixed));
  }
}

/** Return what a request needs of a slice. */
function placeOf({ row, which, axes, fixed }: Slice): Omit<Slice, 'names'> {
  return { row, which, axes, fixed };
}

function windowOf({ y0, x0, y1, x1 }: View): Window {
  return { y0, x0, y1, x1 };
}
