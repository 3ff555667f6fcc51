/**
 * Where the error goes: layers in execution order across, tokens down, and below them the calls of
 * one layer. Only cells in view are drawn.
 */
import { legend, paint, paintsOf, part, type Box } from './cells';
import { clamp, h, swallow, uniqueId } from './dom';
import { endOf } from './format';
import { LayerErrors, MADE, type Place } from './layererrors';
import type { Ask } from './rpc';
import * as T from './strings';
import { Strip } from './strip';
import type { Overview, Row, Step } from './wire';

const [LEAST, HEIGHT, GAP] = [4, 18, 2];
/** Space for the names of tokens and layers, as in timeline.css. */
const [NAMES, HEADS] = [120, 16];
const NAME_WIDTH = 26;
const MOST_ZOOM = 64;

export interface TimelineEvents {
  /** Select a row; -1: nothing was recorded there, then only the token changes. */
  choose: (row: number, step: number) => void;
  position: (position: number) => void;
}

export class Timeline {
  readonly root: HTMLElement;
  private uid = uniqueId();
  private told = h('span', { class: 'llmdebug-told' });
  private title = h('span', { class: 'llmdebug-dim llmdebug-title' });
  private legend = legend();
  private canvas = h('canvas', { class: 'llmdebug-cells', 'aria-hidden': 'true' });
  private now = h('div', { class: 'llmdebug-now', 'aria-hidden': 'true' });
  private cell = h('div', { class: 'llmdebug-cell-cursor', role: 'gridcell', id: this.uid });
  private body = h('div', { class: 'llmdebug-time-body', role: 'row' });
  private names = h('div', { class: 'llmdebug-time-names', 'aria-hidden': 'true' });
  private heads = h('div', { class: 'llmdebug-time-heads', 'aria-hidden': 'true' });
  private grid: HTMLElement;
  private strip: Strip;
  private errors: LayerErrors | null = null;
  private cursor: Place = { layer: 0, step: 0 };
  /** The selected row. */
  private row: Row | null = null;
  private position = 0;
  private zoom = 1;
  private width = LEAST;
  private frame = 0;
  private resize = new ResizeObserver(() => this.lay());
  /** Another theme has other colours, which the canvas has to be drawn in. */
  private themes = new MutationObserver(() => this.schedule());
  private scheme = window.matchMedia('(prefers-color-scheme: dark)');

  constructor(
    private ask: Ask,
    private overview: Overview,
    private events: TimelineEvents,
  ) {
    this.body.append(this.canvas, this.now, this.cell);
    this.grid = h(
      'div',
      {
        class: 'llmdebug-time-grid',
        role: 'grid',
        tabindex: 0,
        'aria-label': T.timeline,
        'aria-activedescendant': this.uid,
      },
      h('div', { class: 'llmdebug-time-corner' }),
      this.heads,
      this.names,
      this.body,
    );
    this.strip = new Strip(ask, {
      choose: row => this.events.choose(row, this.cursor.step),
      tell: text => this.say(text),
    });
    this.root = h(
      'section',
      { class: 'llmdebug-timeline', 'aria-label': T.timeline },
      h(
        'div',
        { class: 'llmdebug-time-head' },
        h('h3', {}, T.timeline),
        this.told,
        this.legend,
        this.title,
      ),
      this.grid,
      this.strip.root,
    );
    this.listen();
    this.resize.observe(this.grid);
    this.themes.observe(document.body, { attributeFilter: ['data-jp-theme-light', 'class'] });
    this.scheme.addEventListener('change', this.schedule);
    this.take(overview);
  }

  /** Show new verdicts, or another comparison. */
  take(overview: Overview): void {
    if (overview.inside !== this.overview.inside) this.row = null; // it is the other comparison's
    this.overview = overview;
    this.title.textContent = overview.title;
    this.say('');
    void this.load();
  }

  /** Mark the selected token. */
  show(position: number): void {
    this.position = position;
    this.mark();
    this.schedule();
  }

  /** Mark the call of the selected row, and open its layer. */
  follow(row: Row): void {
    this.row = row;
    this.strip.point(row);
    const place = this.placeOf(row);
    if (place) void this.open(place);
  }

  dispose(): void {
    this.resize.disconnect();
    this.themes.disconnect();
    this.scheme.removeEventListener('change', this.schedule);
    this.strip.dispose();
    cancelAnimationFrame(this.frame);
  }

  private get steps(): Step[] {
    return this.overview.steps;
  }

  /** Return the place of a row, if it is known and in a layer. */
  private placeOf(row: Row | null): Place | undefined {
    const layer = (row && this.errors?.layerOf(row.path)) ?? -1;
    return row && layer >= 0 ? { layer, step: row.step } : undefined;
  }

  private async load(): Promise<void> {
    const { overview } = this;
    const reply = await this.ask('layers', {});
    if (!reply || overview !== this.overview) return;
    const errors = new LayerErrors(reply, this.steps);
    this.root.hidden = errors.layers.length === 0;
    this.errors = this.root.hidden ? null : errors;
    if (!this.errors) return;
    this.grid.setAttribute('aria-rowcount', String(this.steps.length));
    this.grid.setAttribute('aria-colcount', String(errors.layers.length));
    this.lay();
    const start = this.placeOf(this.row) ?? errors.firstBad();
    await this.open(start ?? { layer: 0, step: this.position });
    this.reveal();
  }

  private async open(place: Place): Promise<void> {
    this.cursor = place;
    this.mark();
    if (this.errors) await this.strip.show(place, this.errors);
  }

  private listen(): void {
    this.grid.addEventListener('keydown', event => this.key(event));
    this.grid.addEventListener('scroll', () => this.schedule(), { passive: true });
    this.grid.addEventListener('wheel', event => this.wheel(event), { passive: false });
    this.body.addEventListener('pointermove', event => this.tell(this.under(event)));
    this.body.addEventListener('pointerleave', () => this.say(''));
    this.body.addEventListener('click', event => this.choose(this.under(event)));
    this.names.addEventListener('click', event => {
      const box = this.names.getBoundingClientRect();
      this.events.position(this.within(0, Math.floor((event.clientY - box.top) / HEIGHT)).step);
    });
  }

  private say(text: string): void {
    this.told.textContent = text || T.timelineHint;
  }

  /** Fit the layers into the width; below the least width, or zoomed, the timeline scrolls. */
  private lay(): void {
    const { errors, grid, steps } = this;
    const room = grid.clientWidth - NAMES;
    if (!errors || room <= 0) return;
    this.width = Math.max(LEAST, room / errors.layers.length) * this.zoom;
    this.body.style.width = `${errors.layers.length * this.width}px`;
    this.body.style.height = `${steps.length * HEIGHT}px`;
    const every = Math.ceil(NAME_WIDTH / this.width);
    this.heads.replaceChildren(
      ...errors.layers.flatMap((layer, i) =>
        i % every === 0 ? [this.head(i, every, errors.name(i), layer.path)] : [],
      ),
    );
    this.mark();
    this.paint();
  }

  private head(layer: number, every: number, name: string, path: string): HTMLElement {
    const left = `left:${layer * this.width}px;width:${every * this.width - GAP}px`;
    return h('span', { style: left, title: name }, path.split('.').at(-1) || name);
  }

  private mark(): void {
    const { cursor, errors, width } = this;
    if (!errors) return;
    this.now.style.top = `${this.position * HEIGHT}px`;
    Object.assign(this.cell.style, {
      left: `${cursor.layer * width}px`,
      top: `${cursor.step * HEIGHT}px`,
      width: `${Math.max(LEAST, width - GAP)}px`,
      height: `${HEIGHT - GAP}px`,
    });
    this.cell.setAttribute('aria-rowindex', String(cursor.step + 1));
    this.cell.setAttribute('aria-colindex', String(cursor.layer + 1));
    this.cell.setAttribute('aria-label', errors.says(cursor));
  }

  private schedule = (): void => {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paint());
  };

  private paint(): void {
    const { canvas, errors, grid, width } = this;
    const context = canvas.getContext('2d');
    if (!errors || !context) return;
    const ratio = window.devicePixelRatio || 1;
    const [layers, steps] = [errors.layers.length, this.steps.length];
    const across = Math.min(layers * width, Math.max(0, grid.clientWidth - NAMES));
    const down = Math.min(steps * HEIGHT, Math.max(0, grid.clientHeight - HEADS));
    canvas.width = Math.round(across * ratio);
    canvas.height = Math.round(down * ratio);
    Object.assign(canvas.style, { width: `${across}px`, height: `${down}px` });
    context.scale(ratio, ratio);
    context.translate(-grid.scrollLeft, -grid.scrollTop);
    const paints = paintsOf(this.legend);
    const [left, top] = [Math.floor(grid.scrollLeft / width), Math.floor(grid.scrollTop / HEIGHT)];
    const right = Math.min(layers, Math.ceil((grid.scrollLeft + across) / width));
    const bottom = Math.min(steps, Math.ceil((grid.scrollTop + down) / HEIGHT));
    const gap = width > 8 ? GAP : 0.5;
    for (let step = top; step < bottom; step++)
      for (let layer = left; layer < right; layer++) {
        const place = { layer, step };
        const [state, share] = [errors.state(place), errors.share(place)];
        const box: Box = [layer * width, step * HEIGHT, width - gap, HEIGHT - GAP];
        paint(context, state, box, paints, share);
        if (state === MADE) this.cross(context, part(box, share));
      }
    this.nameSteps(top, bottom);
  }

  /** The cell where the error is made is not told by its colour alone. */
  private cross(context: CanvasRenderingContext2D, [left, top, width, height]: Box): void {
    const [x, y] = [left + width / 2, top + height / 2];
    const arm = Math.min(4, this.width / 4, height / 2);
    context.strokeStyle = '#fff';
    context.lineWidth = arm > 2 ? 1.75 : 1;
    context.beginPath();
    context.moveTo(x - arm, y - arm);
    context.lineTo(x + arm, y + arm);
    context.moveTo(x - arm, y + arm);
    context.lineTo(x + arm, y - arm);
    context.stroke();
  }

  private nameSteps(first: number, last: number): void {
    this.names.replaceChildren(
      ...this.steps
        .slice(first, last)
        .map((step, i) =>
          h(
            'span',
            {
              class: first + i === this.position ? 'llmdebug-time-now' : undefined,
              style: `top:${(first + i) * HEIGHT}px`,
              title: [step.label, step.text].filter(Boolean).join('\n'),
            },
            step.label,
            step.text ? h('i', {}, ` ${T.fed(endOf(step.text, 10))}`) : null,
          ),
        ),
    );
  }

  private under(event: MouseEvent): Place {
    const box = this.body.getBoundingClientRect();
    const layer = Math.floor((event.clientX - box.left) / this.width);
    return this.within(layer, Math.floor((event.clientY - box.top) / HEIGHT));
  }

  private within(layer: number, step: number): Place {
    return {
      layer: clamp(layer, 0, (this.errors?.layers.length ?? 1) - 1),
      step: clamp(step, 0, this.steps.length - 1),
    };
  }

  private tell(place: Place): void {
    if (this.errors) this.say(this.errors.says(place));
  }

  private choose(place: Place): void {
    if (!this.errors) return;
    void this.open(place);
    this.events.choose(this.errors.row(place), place.step);
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const { layer, step } = this.cursor;
    const moves: Record<string, [number, number]> = {
      ArrowLeft: [layer - 1, step],
      ArrowRight: [layer + 1, step],
      ArrowUp: [layer, step - 1],
      ArrowDown: [layer, step + 1],
      PageUp: [layer, step - 10],
      PageDown: [layer, step + 10],
      Home: [0, step],
      End: [Infinity, step],
    };
    const to = moves[event.key];
    if (to) {
      this.cursor = this.within(...to);
      this.mark();
      this.tell(this.cursor);
      this.reveal();
    } else if (event.key === 'Enter' || event.key === ' ') this.choose(this.cursor);
    else if (event.key === '+' || event.key === '=') this.scale(2);
    else if (event.key === '-') this.scale(0.5);
    else if (event.key === '0') this.scale(0);
    else return;
    swallow(event);
  }

  /** Zoom with the wheel and a modifier, as maps do: the wheel alone scrolls the page. */
  private wheel(event: WheelEvent): void {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const before = this.under(event).layer;
    this.scale(event.deltaY < 0 ? 2 : 0.5);
    const box = this.grid.getBoundingClientRect();
    this.grid.scrollLeft = before * this.width - (event.clientX - box.left - NAMES);
  }

  private scale(factor: number): void {
    this.zoom = clamp(this.zoom * factor, 1, MOST_ZOOM);
    this.lay();
    this.reveal();
  }

  /** Scroll the cursor into view. */
  private reveal(): void {
    const { cursor, grid, width } = this;
    grid.scrollLeft = kept(grid.scrollLeft, cursor.layer * width, width, grid.clientWidth - NAMES);
    grid.scrollTop = kept(grid.scrollTop, cursor.step * HEIGHT, HEIGHT, grid.clientHeight - HEADS);
  }
}

/** Return the scroll offset, nearest to `scroll`, that shows an item. */
function kept(scroll: number, start: number, size: number, room: number): number {
  return clamp(scroll, start + size - room, start);
}
