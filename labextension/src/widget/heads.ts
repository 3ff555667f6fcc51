/** Thumbnails of all slices along one axis, such as attention heads. A click opens one. */
import { Scale } from './colours';
import { button, clamp, h, hasFocus, swallow } from './dom';
import type { Slice } from './heatmap';
import { numeric } from './format';
import type { Ask } from './rpc';
import * as T from './strings';
import { floats } from './window';
import type { Heads as Planes } from './wire';

const CELLS = 40;
/** Thumbnails per request. The page shown is the one of the open slice. */
const PAGE = 64;

export class Heads {
  readonly root: HTMLDetailsElement;
  private title = h('summary');
  private grid = h('div', {
    class: 'llmdebug-heads-grid',
    role: 'radiogroup',
    onkeydown: (event: KeyboardEvent) => this.key(event),
  });
  private note = h('span', { class: 'llmdebug-dim' });
  private previous = this.turner(T.previousHeads, '◀', -1);
  private next = this.turner(T.nextHeads, '▶', 1);
  private slice: Slice | null = null;
  private axis = -1;
  private name = '';
  private drawn = '';
  private first = 0;
  private total = 0;

  constructor(
    private ask: Ask,
    private choose: (axis: number, head: number) => void,
    open = false,
  ) {
    this.root = h(
      'details',
      { class: 'llmdebug-heads', hidden: true, open, ontoggle: () => void this.load() },
      this.title,
      this.grid,
      h('div', { class: 'llmdebug-pager' }, this.previous, this.note, this.next),
    );
  }

  /** `axis` -1: there are no other slices. */
  show(slice: Slice, axis: number, name: string): void {
    this.slice = slice;
    this.axis = axis;
    this.name = name;
    this.root.hidden = axis < 0;
    this.title.textContent = T.heads(name);
    this.grid.setAttribute('aria-label', T.heads(name));
    void this.load();
    this.mark();
  }

  /** Fetch the thumbnails if they are visible and not yet drawn. */
  private async load(): Promise<void> {
    const { slice, axis } = this;
    if (!slice || axis < 0 || !this.root.open) return;
    const first = Math.floor((slice.fixed[axis] ?? 0) / PAGE) * PAGE;
    const fixed = slice.fixed.map((at, i) => (i === axis ? 0 : at));
    const wanted = JSON.stringify({ ...slice, axis, first, fixed });
    if (wanted === this.drawn) return;
    this.drawn = wanted;
    const { row, which, axes, fixed: at } = slice;
    const reply = await this.ask('heads', {
      row,
      which,
      axes,
      fixed: at,
      axis,
      first,
      size: CELLS,
    });
    if (wanted !== this.drawn) return;
    if (reply) this.paint(reply.answer, floats(reply.buffers[0]), slice.which === 'difference');
    else this.clear();
  }

  private clear(): void {
    this.drawn = '';
    this.grid.replaceChildren();
    this.note.textContent = '';
  }

  private paint(planes: Planes, data: Float32Array, signed: boolean): void {
    const { h: height, w: width, first, count, total } = planes;
    const focused = hasFocus(this.grid);
    [this.first, this.total] = [first, total];
    this.previous.hidden = this.next.hidden = total <= PAGE;
    this.previous.disabled = first === 0;
    this.next.disabled = first + count >= total;
    const scale = new Scale(numeric(planes.lo), numeric(planes.hi), signed);
    this.note.textContent = T.headsShown(first, count, total);
    this.grid.replaceChildren(
      ...Array.from({ length: count }, (_, i) => {
        const picture = h('canvas', { width, height, 'aria-hidden': 'true' });
        const pixels = new ImageData(Math.max(1, width), Math.max(1, height));
        const words = new Uint32Array(pixels.data.buffer);
        data
          .subarray(i * height * width, (i + 1) * height * width)
          .forEach((value, k) => (words[k] = scale.word(value)));
        picture.getContext('2d')!.putImageData(pixels, 0, 0);
        const head = first + i;
        return h(
          'button',
          {
            class: 'llmdebug-thumb',
            type: 'button',
            role: 'radio',
            'aria-label': `${this.name} ${head}`,
            onclick: () => this.go(head),
          },
          picture,
          String(head),
        );
      }),
    );
    this.mark();
    if (focused) this.grid.querySelector<HTMLElement>('[tabindex="0"]')?.focus();
  }

  private turner(label: string, face: string, pages: 1 | -1): HTMLButtonElement {
    const turn = () => this.choose(this.axis, this.first + pages * PAGE);
    return button(turn, { hidden: true, 'aria-label': label, title: label }, face);
  }

  private mark(): void {
    const now = (this.slice?.fixed[this.axis] ?? 0) - this.first;
    const heads = [...this.grid.children];
    heads.forEach((head, i) => {
      head.setAttribute('aria-checked', String(i === now));
      head.setAttribute('tabindex', i === Math.min(now, heads.length - 1) ? '0' : '-1');
    });
  }

  private go(head: number): void {
    this.choose(this.axis, head);
    (this.grid.children[head - this.first] as HTMLElement | undefined)?.focus();
  }

  private key(event: KeyboardEvent): void {
    const last = this.total - 1;
    const now = this.slice?.fixed[this.axis] ?? 0;
    const to: Record<string, number> = {
      ArrowLeft: now - 1,
      ArrowUp: now - 1,
      ArrowRight: now + 1,
      ArrowDown: now + 1,
      Home: 0,
      End: last,
    };
    const head = to[event.key];
    if (head === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    swallow(event);
    this.go(clamp(head, 0, last));
  }
}
