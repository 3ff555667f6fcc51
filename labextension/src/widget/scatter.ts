/** A scatter plot of golden (x) against mine (y), or their density if there are many elements. */
import { Scale } from './colours';
import { clamp, h } from './dom';
import { figure, numeric } from './format';
import type { Ask } from './rpc';
import { SIDES } from './strings';
import * as T from './strings';
import { floats } from './window';
import type { Scatter as Answer } from './wire';

const POINTS = 4096;
const CELLS = 160;
const POINT = 2.5;

export class Scatter {
  readonly root: HTMLElement;
  private canvas = h('canvas', { class: 'llmdebug-scatter-plot', role: 'img' });
  private low = h('span');
  private high = h('span');
  private hint = h('div', { class: 'llmdebug-scatter-told' }, T.scatterHint);
  private answer: Answer | null = null;
  private data: Float32Array[] = [];
  private cells = new Uint32Array();
  private asked = 0;
  private resize = new ResizeObserver(() => this.paint());

  constructor(private ask: Ask) {
    this.root = h(
      'figure',
      { class: 'llmdebug-scatter' },
      h('figcaption', {}, T.scatter),
      this.canvas,
      h('div', { class: 'llmdebug-caption' }, this.low, h('span', {}, T.scatterAxes), this.high),
      this.hint,
    );
    this.canvas.addEventListener('pointermove', event => this.tell(event));
    this.canvas.addEventListener(
      'pointerleave',
      () => void (this.hint.textContent = T.scatterHint),
    );
    this.resize.observe(this.canvas);
  }

  async show(row: number): Promise<void> {
    const asked = ++this.asked;
    const reply =
      row < 0 ? undefined : await this.ask('scatter', { row, points: POINTS, size: CELLS });
    if (asked !== this.asked) return;
    this.answer = reply?.answer ?? null;
    this.root.hidden = !reply; // else it would show the tensor before
    if (!reply) return;
    const { size, count, broken, lo, hi } = reply.answer;
    this.data = size ? [] : reply.buffers.map(floats);
    this.cells = size ? new Uint32Array(floats(reply.buffers[0]).buffer) : new Uint32Array();
    this.low.textContent = figure(lo, 3);
    this.high.textContent = figure(hi, 3);
    this.hint.textContent = T.scatterHint;
    this.canvas.dataset.kind = size ? 'density' : 'points';
    const range = T.scatterSays(count, figure(lo, 3), figure(hi, 3));
    const label = [T.scatter, range, broken ? T.brokenPairs(broken) : ''].filter(Boolean);
    this.canvas.setAttribute('aria-label', label.join(', '));
    this.paint();
  }

  dispose(): void {
    this.resize.disconnect();
  }

  private paint(): void {
    const { answer, canvas } = this;
    const context = canvas.getContext('2d');
    if (!answer || !context || canvas.clientWidth === 0) return;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.scale(ratio, ratio);
    const style = getComputedStyle(canvas);
    context.strokeStyle = style.color;
    context.globalAlpha = 0.5;
    context.beginPath();
    context.moveTo(0, height);
    context.lineTo(width, 0);
    context.stroke();
    context.globalAlpha = 1;
    if (answer.size) return this.density(context, answer.size, width, height);
    const [lo, hi] = [numeric(answer.lo), numeric(answer.hi)];
    const [golden, mine] = this.data;
    context.fillStyle = style.accentColor;
    context.globalAlpha = 0.6;
    golden?.forEach((x, i) =>
      context.fillRect(
        ((x - lo) / (hi - lo)) * (width - POINT),
        (1 - (mine![i]! - lo) / (hi - lo)) * (height - POINT),
        POINT,
        POINT,
      ),
    );
  }

  /** Draw the density. Empty cells stay transparent, so that the diagonal remains visible. */
  private density(
    context: CanvasRenderingContext2D,
    size: number,
    width: number,
    height: number,
  ): void {
    const most = this.cells.reduce((most, count) => Math.max(most, count), 1);
    const scale = new Scale(0, Math.log1p(most));
    const pixels = new ImageData(size, size);
    const words = new Uint32Array(pixels.data.buffer);
    this.cells.forEach((count, i) => {
      const row = size - 1 - Math.floor(i / size); // mine increases upwards
      if (count) words[row * size + (i % size)] = scale.word(Math.log1p(count));
    });
    const image = h('canvas', { width: size, height: size });
    image.getContext('2d')!.putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(image, 0, 0, width, height);
  }

  private tell(event: PointerEvent): void {
    const { answer, canvas } = this;
    if (!answer) return;
    const [lo, hi] = [numeric(answer.lo), numeric(answer.hi)];
    const [x, y] = [
      clamp(event.offsetX / canvas.clientWidth, 0, 1),
      clamp(1 - event.offsetY / canvas.clientHeight, 0, 1),
    ];
    const at = (share: number) => figure(lo + share * (hi - lo), 3);
    const cell = (share: number) => Math.min(answer.size - 1, Math.floor(share * answer.size));
    const held = answer.size
      ? ` · ${T.elements(this.cells[cell(y) * answer.size + cell(x)] ?? 0)}`
      : '';
    this.hint.textContent = `${SIDES.golden} ${at(x)} · ${SIDES.mine} ${at(y)}${held}`;
  }
}
