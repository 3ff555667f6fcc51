/** A map of errors: one row per layer, one column per token. Only cells in view are drawn. */
import { Scale } from './colours';
import { clamp, h, swallow, uniqueId } from './dom';
import { figure, shortPath } from './format';
import {
  DIVERGED,
  NOTHING,
  UNMATCHED,
  type LayerErrors,
  type Place,
  type PlaceEvents,
} from './layererrors';
import * as T from './strings';

const HEIGHT = 234;
const [LEAST, WIDEST, HIGHEST] = [4, 40, 18];
/** Space for the names of layers and steps, as in layers.css. */
const [NAMES, HEADS] = [132, 18];
const [NAME_HEIGHT, HEAD_WIDTH] = [13, 76];
/** The colours cover at most so many decades on either side of the limit. */
const REACH = 6;

export class LayerMap {
  readonly root: HTMLElement;
  private uid = uniqueId();
  private canvas = h('canvas', { class: 'llmdebug-layer-cells', 'aria-hidden': 'true' });
  private now = h('div', { class: 'llmdebug-layer-now', 'aria-hidden': 'true' });
  private cell = h('div', { class: 'llmdebug-layer-cursor', role: 'gridcell', id: this.uid });
  private body = h(
    'div',
    { class: 'llmdebug-layer-body', role: 'row' },
    this.canvas,
    this.now,
    this.cell,
  );
  private names = h('div', { class: 'llmdebug-layer-names', 'aria-hidden': 'true' });
  private heads = h('div', { class: 'llmdebug-layer-heads', 'aria-hidden': 'true' });
  private grid = h(
    'div',
    {
      class: 'llmdebug-layer-grid',
      role: 'grid',
      tabindex: 0,
      'aria-label': T.layerMap,
      'aria-activedescendant': this.uid,
    },
    h('div', { class: 'llmdebug-layer-corner' }),
    this.heads,
    this.names,
    this.body,
  );
  private ramp = h('span', { class: 'llmdebug-ramp' });
  private low = h('span');
  private high = h('span');
  private errors: LayerErrors | null = null;
  private scale = new Scale(-1, 1);
  private cursor: Place = { layer: 0, step: 0 };
  private step = 0;
  private size = { width: LEAST, height: LEAST };
  private frame = 0;
  private resize = new ResizeObserver(() => this.lay());

  constructor(private events: PlaceEvents) {
    this.root = h(
      'figure',
      { class: 'llmdebug-layer-map' },
      h('figcaption', {}, T.layerMap),
      this.grid,
      h('div', { class: 'llmdebug-layer-legend' }, this.low, this.ramp, this.high),
      h('div', { class: 'llmdebug-dim llmdebug-marks' }, T.layerMarks),
    );
    this.grid.addEventListener('keydown', event => this.key(event));
    this.grid.addEventListener('scroll', () => this.schedule(), { passive: true });
    this.grid.addEventListener('focus', () => this.tell(this.cursor));
    this.body.addEventListener('pointermove', event => this.tell(this.under(event)));
    this.body.addEventListener('pointerleave', () => this.events.tell(''));
    this.body.addEventListener('click', event => this.choose(this.under(event)));
    this.resize.observe(this.grid);
  }

  take(errors: LayerErrors): void {
    this.errors = errors;
    this.cursor = errors.firstBad() ?? { layer: 0, step: this.step };
    const reach = decades(errors);
    this.scale = new Scale(-reach, reach, true);
    this.ramp.style.background = this.scale.gradient;
    this.low.textContent = T.limits(figure(10 ** -reach));
    this.high.textContent = T.limits(figure(10 ** reach));
    this.grid.setAttribute('aria-rowcount', String(errors.layers.length));
    this.grid.setAttribute('aria-colcount', String(errors.steps.length));
    this.lay();
    this.reveal();
  }

  show(step: number): void {
    this.step = step;
    this.mark();
  }

  dispose(): void {
    this.resize.disconnect();
    cancelAnimationFrame(this.frame);
  }

  /** Fit cells and names into the available space; below the least cell size, the map scrolls. */
  private lay(): void {
    const { errors } = this;
    if (!errors || this.grid.clientWidth === 0) return;
    const [layers, steps] = [errors.layers.length, errors.steps.length];
    const width = clamp(Math.floor((this.grid.clientWidth - NAMES) / steps), LEAST, WIDEST);
    const height = clamp(Math.floor(HEIGHT / layers), LEAST, HIGHEST);
    this.size = { width, height };
    this.body.style.width = `${steps * width}px`;
    this.body.style.height = `${layers * height}px`;
    this.names.replaceChildren(
      ...labels(layers, height, NAME_HEIGHT, 'top', i => [
        shortPath(errors.name(i), '', 19),
        errors.name(i),
      ]),
    );
    this.heads.replaceChildren(
      ...labels(steps, width, HEAD_WIDTH, 'left', i => [
        errors.steps[i]!.label,
        errors.steps[i]!.label,
      ]),
    );
    this.mark();
    this.paint();
  }

  /** Mark the selected step and the cell under the keyboard cursor. */
  private mark(): void {
    const {
      errors,
      cursor,
      size: { width, height },
    } = this;
    if (!errors) return;
    this.now.style.left = `${this.step * width}px`;
    this.now.style.width = `${width}px`;
    Object.assign(this.cell.style, {
      left: `${cursor.step * width}px`,
      top: `${cursor.layer * height}px`,
      width: `${width}px`,
      height: `${height}px`,
    });
    this.cell.setAttribute('aria-rowindex', String(cursor.layer + 1));
    this.cell.setAttribute('aria-colindex', String(cursor.step + 1));
    this.cell.setAttribute('aria-selected', String(cursor.step === this.step));
    this.cell.setAttribute('aria-label', errors.says(cursor));
  }

  private schedule(): void {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paint());
  }

  private paint(): void {
    const {
      canvas,
      errors,
      grid,
      size: { width, height },
    } = this;
    const context = canvas.getContext('2d');
    if (!errors || !context) return;
    const ratio = window.devicePixelRatio || 1;
    const [layers, steps] = [errors.layers.length, errors.steps.length];
    const across = Math.min(steps * width, Math.max(0, grid.clientWidth - NAMES));
    const down = Math.min(layers * height, Math.max(0, grid.clientHeight - HEADS));
    canvas.width = Math.round(across * ratio);
    canvas.height = Math.round(down * ratio);
    Object.assign(canvas.style, { width: `${across}px`, height: `${down}px` });
    context.scale(ratio, ratio);
    context.translate(-grid.scrollLeft, -grid.scrollTop);
    const last = {
      layer: Math.min(layers, Math.ceil((grid.scrollTop + down) / height)),
      step: Math.min(steps, Math.ceil((grid.scrollLeft + across) / width)),
    };
    for (let layer = Math.floor(grid.scrollTop / height); layer < last.layer; layer++)
      for (let step = Math.floor(grid.scrollLeft / width); step < last.step; step++)
        this.draw(context, { layer, step });
  }

  /** Draw a cell: a cross marks a diverged one, a frame an unmatched one. */
  private draw(context: CanvasRenderingContext2D, place: Place): void {
    const { width, height } = this.size;
    const [x, y] = [place.step * width, place.layer * height];
    const [state, gap] = [this.errors!.state(place), Math.min(width, height) > 5 ? 1 : 0.5];
    if (state === NOTHING) return;
    if (state === UNMATCHED) {
      context.strokeStyle = '#888';
      context.lineWidth = 1;
      return context.strokeRect(x + 0.5, y + 0.5, width - gap - 1, height - gap - 1);
    }
    const ratio = this.errors!.ratio(place);
    const unknown = state === DIVERGED ? Infinity : -Infinity;
    const value = Number.isNaN(ratio) ? unknown : Math.log10(ratio);
    context.fillStyle = this.scale.css(value);
    context.fillRect(x, y, width - gap, height - gap);
    if (state === DIVERGED)
      this.cross(
        context,
        x + (width - gap) / 2,
        y + (height - gap) / 2,
        Math.max(1, Math.min(width, height) / 4),
        this.scale.ink(value),
      );
  }

  private cross(
    context: CanvasRenderingContext2D,
    x: number,
    y: number,
    arm: number,
    ink: string,
  ): void {
    context.strokeStyle = ink;
    context.lineWidth = arm > 2 ? 1.5 : 1;
    context.beginPath();
    context.moveTo(x - arm, y - arm);
    context.lineTo(x + arm, y + arm);
    context.moveTo(x - arm, y + arm);
    context.lineTo(x + arm, y - arm);
    context.stroke();
  }

  private under(event: MouseEvent): Place {
    const box = this.body.getBoundingClientRect();
    return this.within({
      layer: Math.floor((event.clientY - box.top) / this.size.height),
      step: Math.floor((event.clientX - box.left) / this.size.width),
    });
  }

  private within({ layer, step }: Place): Place {
    return {
      layer: clamp(layer, 0, (this.errors?.layers.length ?? 1) - 1),
      step: clamp(step, 0, (this.errors?.steps.length ?? 1) - 1),
    };
  }

  private tell(place: Place): void {
    if (this.errors) this.events.tell(this.errors.says(place));
  }

  private choose(place: Place): void {
    this.cursor = place;
    this.mark();
    this.events.choose(place);
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || !this.errors) return;
    const { layer, step } = this.cursor;
    const moves: Record<string, Place> = {
      ArrowUp: { layer: layer - 1, step },
      ArrowDown: { layer: layer + 1, step },
      ArrowLeft: { layer, step: step - 1 },
      ArrowRight: { layer, step: step + 1 },
      PageUp: { layer: layer - 10, step },
      PageDown: { layer: layer + 10, step },
      Home: { layer, step: 0 },
      End: { layer, step: Infinity },
    };
    const to = moves[event.key];
    if (to) this.move(this.within(to));
    else if (event.key === 'Enter' || event.key === ' ') this.choose(this.cursor);
    else return;
    swallow(event);
  }

  private move(to: Place): void {
    this.cursor = to;
    this.mark();
    this.tell(to);
    this.reveal();
  }

  /** Scroll the keyboard cursor into view. */
  private reveal(): void {
    const {
      cursor,
      grid,
      size: { width, height },
    } = this;
    grid.scrollLeft = kept(grid.scrollLeft, cursor.step * width, width, grid.clientWidth - NAMES);
    grid.scrollTop = kept(grid.scrollTop, cursor.layer * height, height, grid.clientHeight - HEADS);
  }
}

/** Return how many decades the colours cover on either side of the limit. */
function decades(errors: LayerErrors): number {
  let most = 1;
  for (let layer = 0; layer < errors.layers.length; layer++)
    for (let step = 0; step < errors.steps.length; step++) {
      const away = Math.abs(Math.log10(errors.ratio({ layer, step })));
      if (Number.isFinite(away)) most = Math.max(most, away);
    }
  return Math.min(REACH, Math.ceil(most));
}

/** Return the scroll offset, nearest to `scroll`, that shows an item. */
function kept(scroll: number, start: number, size: number, room: number): number {
  return clamp(scroll, start + size - room, start);
}

/** Return the names of every n-th item, as many as fit. */
function labels(
  count: number,
  size: number,
  least: number,
  side: 'top' | 'left',
  text: (i: number) => [string, string],
): HTMLElement[] {
  const every = Math.ceil(least / size);
  const height = Math.max(size, NAME_HEIGHT);
  const extent = side === 'top' ? `line-height:${height}px` : `width:${every * size}px`;
  return Array.from({ length: Math.ceil(count / every) }, (_, k) => {
    const [short, title] = text(k * every);
    return h('span', { style: `${side}:${k * every * size}px;${extent}`, title }, short);
  });
}
