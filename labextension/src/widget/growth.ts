/** Plots the error along depth: one line per step, on a log scale. */
import { clamp, h, svg } from './dom';
import { figure, shortPath } from './format';
import { DIVERGED, type LayerErrors, type Place, type PlaceEvents } from './layererrors';
import * as T from './strings';

const HEIGHT = 252;
const [LEFT, RIGHT, TOP, BOTTOM] = [44, 10, 8, 20];
const LABEL_WIDTH = 96;
/** With more lines than this, only a selection is drawn. */
const MOST_LINES = 200;
/** A click within so many pixels of the selected step's line selects that step. */
const NEAR = 10;

interface Axes {
  layers: number;
  width: number;
  /** In decades. */
  low: number;
  high: number;
}

export class Growth {
  readonly root: HTMLElement;
  private plot = h('div', { class: 'llmdebug-growth-plot' });
  private errors: LayerErrors | null = null;
  private axes: Axes = { layers: 0, width: 0, low: -8, high: 0 };
  private step = 0;
  private resize = new ResizeObserver(() => this.paint());

  constructor(private events: PlaceEvents) {
    this.root = h(
      'figure',
      { class: 'llmdebug-growth' },
      h('figcaption', {}, T.growth),
      this.plot,
      h('div', { class: 'llmdebug-dim llmdebug-marks' }, T.growthMarks),
    );
    this.plot.addEventListener(
      'click',
      event => this.errors && this.events.choose(this.nearest(event)),
    );
    this.plot.addEventListener(
      'pointermove',
      event => this.errors && this.events.tell(this.errors.says(this.nearest(event))),
    );
    this.plot.addEventListener('pointerleave', () => this.events.tell(''));
    this.resize.observe(this.plot);
  }

  take(errors: LayerErrors): void {
    this.errors = errors;
    // calls outside the layers come last and have no depth
    const layers = errors.layers.filter(layer => layer.node >= 0).length;
    this.axes = { layers, width: 0, ...decades(errors, layers) };
    this.root.hidden = layers === 0;
    this.paint();
  }

  show(step: number): void {
    this.step = step;
    this.paint();
  }

  dispose(): void {
    this.resize.disconnect();
  }

  private paint(): void {
    const { errors, axes, step } = this;
    axes.width = this.plot.clientWidth;
    if (!errors || axes.width === 0) return;
    const every = Math.ceil(errors.steps.length / MOST_LINES);
    const others = errors.steps.flatMap((_, i) =>
      i % every === 0 && i !== step ? [this.line(i, errors.errorAt.bind(errors))] : [],
    );
    const picture = svg(
      'svg',
      { width: axes.width, height: HEIGHT, role: 'img', 'aria-label': this.label(errors) },
      ...this.ticks(),
      ...this.names(errors),
      svg('path', { class: 'llmdebug-growth-others', d: others.join('') }),
      svg('path', {
        class: 'llmdebug-growth-limit',
        d: this.line(step, errors.limitAt.bind(errors)),
      }),
      svg('path', {
        class: 'llmdebug-growth-now',
        d: this.line(step, errors.errorAt.bind(errors)),
      }),
      ...this.points(errors),
    );
    this.plot.replaceChildren(picture);
  }

  private label(errors: LayerErrors): string {
    const bad = Array.from({ length: this.axes.layers }, (_, layer) => layer).filter(
      layer => errors.state({ layer, step: this.step }) === DIVERGED,
    );
    const diverged = T.divergedLayers(bad.length, bad.length ? errors.name(bad[0]!) : '');
    return `${T.growth}, ${errors.steps[this.step]?.label ?? ''}: ${diverged}`;
  }

  private x(layer: number): number {
    const { layers, width } = this.axes;
    return LEFT + ((width - LEFT - RIGHT) * (layer + 0.5)) / layers;
  }

  /** An error of 0 lies on the bottom line. */
  private y(error: number): number {
    const { low, high } = this.axes;
    return (
      TOP + (HEIGHT - TOP - BOTTOM) * (1 - clamp((Math.log10(error) - low) / (high - low), 0, 1))
    );
  }

  /** Return the path of a step's line, with gaps where a layer has no figure. */
  private line(step: number, value: (place: Place) => number): string {
    let [path, pen] = ['', 'M'];
    for (let layer = 0; layer < this.axes.layers; layer++) {
      const at = value({ layer, step });
      if (!Number.isNaN(at)) path += `${pen}${this.x(layer).toFixed(1)} ${this.y(at).toFixed(1)}`;
      pen = Number.isNaN(at) ? 'M' : 'L';
    }
    return path;
  }

  private points(errors: LayerErrors): SVGElement[] {
    return Array.from({ length: this.axes.layers }, (_, layer) => {
      const place = { layer, step: this.step };
      const error = errors.errorAt(place);
      if (Number.isNaN(error)) return null;
      const [x, y] = [this.x(layer), this.y(error)];
      const bad = errors.state(place) === DIVERGED;
      const d = bad
        ? `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`
        : `M${x - 2} ${y}a2 2 0 1 0 4 0a2 2 0 1 0 -4 0`;
      return svg('path', {
        class: `llmdebug-growth-point${bad ? ' llmdebug-growth-bad' : ''}`,
        'data-layer': layer,
        d,
      });
    }).filter(point => point !== null);
  }

  private ticks(): SVGElement[] {
    const { low, high, width } = this.axes;
    const every = Math.ceil((high - low) / 6);
    const marks = Array.from(
      { length: Math.floor((high - low) / every) + 1 },
      (_, i) => high - i * every,
    );
    return marks.flatMap(decade => {
      const y = this.y(10 ** decade);
      return [
        svg('path', { class: 'llmdebug-growth-grid', d: `M${LEFT} ${y}H${width - RIGHT}` }),
        svg(
          'text',
          { x: LEFT - 4, y: y + 4, 'text-anchor': 'end' },
          decade === low ? '0' : figure(10 ** decade),
        ),
      ];
    });
  }

  private names(errors: LayerErrors): SVGElement[] {
    const { layers, width } = this.axes;
    const every = Math.max(1, Math.ceil((layers * LABEL_WIDTH) / (width - LEFT - RIGHT)));
    return Array.from({ length: Math.ceil(layers / every) }, (_, k) =>
      svg(
        'text',
        { x: this.x(k * every), y: HEIGHT - 5, 'text-anchor': 'middle' },
        shortPath(errors.name(k * every), '', 14),
      ),
    );
  }

  private nearest(event: MouseEvent): Place {
    const { axes, errors, step } = this;
    const box = this.plot.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const layer = clamp(
      Math.floor(((x - LEFT) / (axes.width - LEFT - RIGHT)) * axes.layers),
      0,
      axes.layers - 1,
    );
    const away = (at: number) => {
      const error = errors!.errorAt({ layer, step: at });
      return Number.isNaN(error) ? Infinity : Math.abs(this.y(error) - y);
    };
    if (away(step) <= NEAR) return { layer, step };
    return {
      layer,
      step: errors!.steps.reduce((best, _, at) => (away(at) < away(best) ? at : best), step),
    };
  }
}

/** Return the decades that hold all errors and limits, plus one below for errors of 0. */
function decades(errors: LayerErrors, layers: number): { low: number; high: number } {
  let [low, high] = [Infinity, -Infinity];
  for (let layer = 0; layer < layers; layer++)
    for (let step = 0; step < errors.steps.length; step++)
      for (const value of [errors.errorAt({ layer, step }), errors.limitAt({ layer, step })]) {
        if (!(value > 0 && value < Infinity)) continue;
        low = Math.min(low, Math.log10(value));
        high = Math.max(high, Math.log10(value));
      }
  return low > high ? { low: -8, high: 0 } : { low: Math.floor(low) - 1, high: Math.ceil(high) };
}
