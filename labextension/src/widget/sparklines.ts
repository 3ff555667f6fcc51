/** Curves of a tensor's figures over all steps. Each is a slider that selects a step's record. */
import { clamp, h, svg, swallow } from './dom';
import { figure, numeric } from './format';
import type { Ask } from './rpc';
import * as T from './strings';
import type { Line, Point } from './wire';

const POINTS = 400;
const [WIDTH, HEIGHT, EDGE] = [400, 36, 4];
/** A larger ratio of highest to lowest value makes the scale logarithmic. */
const WIDE = 100;

export interface SparklineEvents {
  jump: (row: number) => void;
  step: (index: number) => string;
}

export class Sparklines {
  readonly root = h('div', { class: 'llmdebug-sparklines', hidden: true });
  private curves: Sparkline[] = [];
  private asked = 0;

  constructor(
    private ask: Ask,
    private events: SparklineEvents,
  ) {}

  /** Show the curves of a record. They reuse their elements, as one of them may have the focus. */
  async show(row: number, step: number): Promise<void> {
    const asked = ++this.asked;
    const lines = (await this.ask('series', { row, n: POINTS }))?.answer.lines ?? [];
    if (asked !== this.asked) return;
    this.root.hidden = !lines.some(line => line.points.length > 1);
    while (this.curves.length < lines.length) this.curves.push(new Sparkline(this.events));
    this.curves.length = lines.length;
    this.curves.forEach((curve, i) => curve.show(lines[i]!, step));
    if (this.root.childElementCount !== lines.length)
      this.root.replaceChildren(...this.curves.map(curve => curve.root));
  }
}

class Sparkline {
  readonly root: HTMLElement;
  private name = h('span');
  private range = h('span');
  private plot = h('div', {
    class: 'llmdebug-sparkline',
    role: 'slider',
    tabindex: 0,
    'aria-valuemin': 0,
    title: T.sparklineHint,
  });
  private line: Line = { figure: '', points: [] };
  private at = 0;

  constructor(private events: SparklineEvents) {
    this.root = h(
      'figure',
      {},
      h('figcaption', { class: 'llmdebug-sparkline-caption' }, this.name, this.range),
      this.plot,
    );
    this.plot.addEventListener('click', event => this.go(this.under(event)));
    this.plot.addEventListener('keydown', event => this.key(event));
  }

  show(line: Line, step: number): void {
    this.line = line;
    const behind = line.points.findIndex(point => point.step > step);
    this.at = Math.max(0, (behind < 0 ? line.points.length : behind) - 1);
    this.paint();
  }

  private paint(): void {
    const { points } = this.line;
    const scale = new Height(points.map(point => numeric(point.value)));
    const here = points[this.at];
    this.name.textContent = T.overSteps(this.line.figure);
    this.range.textContent = `${figure(scale.low, 3)} … ${figure(scale.high, 3)}`;
    const says = here ? `${this.events.step(here.step)}: ${figure(here.value)}` : '';
    const labels = {
      'aria-label': this.name.textContent,
      'aria-valuemax': points.length - 1,
      'aria-valuenow': this.at,
      'aria-valuetext': says,
    };
    for (const [name, value] of Object.entries(labels)) this.plot.setAttribute(name, String(value));
    const broken = points.map(({ value }, i) =>
      value !== null && scale.broken(numeric(value)) ? this.vertical(i) : '',
    );
    this.plot.replaceChildren(
      svg(
        'svg',
        { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', 'aria-hidden': 'true' },
        svg('path', { d: this.path(points, scale) }),
        svg('path', { class: 'llmdebug-sparkline-broken', d: broken.join('') }),
        svg('path', { class: 'llmdebug-sparkline-here', d: this.vertical(this.at) }),
      ),
      h('span', { class: 'llmdebug-sparkline-says' }, says),
    );
  }

  private vertical(i: number): string {
    return `M${this.x(i)} 0V${HEIGHT}`;
  }

  private x(i: number): number {
    return Number(
      (EDGE + ((WIDTH - 2 * EDGE) * i) / Math.max(1, this.line.points.length - 1)).toFixed(1),
    );
  }

  /** Return the curve, with gaps where a figure is missing or not finite. */
  private path(points: Point[], scale: Height): string {
    let [path, pen] = ['', 'M'];
    points.forEach(({ value }, i) => {
      const broken = scale.broken(numeric(value));
      if (!broken) path += `${pen}${this.x(i)} ${scale.y(numeric(value)).toFixed(1)}h.1`;
      pen = broken ? 'M' : 'L';
    });
    return path;
  }

  private under(event: MouseEvent): number {
    const box = this.plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    return Math.round(((x - EDGE) / (WIDTH - 2 * EDGE)) * (this.line.points.length - 1));
  }

  private key(event: KeyboardEvent): void {
    const last = this.line.points.length - 1;
    const to: Record<string, number> = {
      ArrowLeft: this.at - 1,
      ArrowDown: this.at - 1,
      ArrowRight: this.at + 1,
      ArrowUp: this.at + 1,
      Home: 0,
      End: last,
    };
    const at = to[event.key];
    if (at === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    swallow(event);
    this.go(at);
  }

  private go(to: number): void {
    const at = clamp(to, 0, this.line.points.length - 1);
    const point = this.line.points[at];
    if (!point || at === this.at) return;
    this.at = at;
    this.paint();
    this.events.jump(point.row);
  }
}

/** Maps values to heights, on a linear or logarithmic scale. */
class Height {
  readonly low: number;
  readonly high: number;
  private logarithmic: boolean;

  constructor(values: number[]) {
    const fine = values.filter(Number.isFinite);
    this.low = fine.length ? Math.min(...fine) : NaN;
    this.high = fine.length ? Math.max(...fine) : NaN;
    this.logarithmic = this.low > 0 && this.high > WIDE * this.low;
  }

  broken(value: number): boolean {
    return !Number.isFinite(value);
  }

  y(value: number): number {
    const [low, high, at] = [this.low, this.high, value].map(one =>
      this.logarithmic ? Math.log(one) : one,
    ) as [number, number, number];
    return EDGE + (HEIGHT - 2 * EDGE) * (high > low ? 1 - (at - low) / (high - low) : 0.5);
  }
}
