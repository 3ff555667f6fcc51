/** How a cell of the timeline looks, by its state. */
import { h } from './dom';
import * as T from './strings';
import { DIVERGED, MADE, NOTHING, REWRITTEN, UNMATCHED } from './layererrors';

/** Pixels of a cell that are filled, however few of its tokens differ. */
const LEAST = 4;

export interface Paints {
  right: string;
  made: string;
  inherited: string;
  line: string;
}

/** Return the colours of the theme: of elements, as a canvas knows no `light-dark()`. */
export function paintsOf(probes: Element): Paints {
  const of = (state: string): string =>
    getComputedStyle(probes.querySelector(`.llmdebug-cell-${state}`)!).backgroundColor;
  return { right: of('right'), made: of('made'), inherited: of('inherited'), line: of('line') };
}

/** Elements that show the colours, with what each means. */
export function legend(): HTMLElement {
  const swatch = (name: string, text: string): HTMLElement =>
    h('span', {}, h('i', { class: `llmdebug-cell-${name}` }), text);
  return h(
    'span',
    { class: 'llmdebug-time-legend', title: T.legendHint },
    swatch('right', T.legend.right),
    swatch('made', T.legend.made),
    swatch('inherited', T.legend.inherited),
    swatch('unmatched', T.legend.unmatched),
    swatch('rewritten', T.legend.rewritten),
    h('i', { class: 'llmdebug-cell-line', hidden: true }),
  );
}

/** The class of a cell that is an element; `paint` draws the same on a canvas. */
export function classOf(state: number): string {
  if (state === MADE) return 'llmdebug-cell-made';
  if (state === DIVERGED) return 'llmdebug-cell-inherited';
  if (state === UNMATCHED) return 'llmdebug-cell-unmatched';
  return state === REWRITTEN ? 'llmdebug-cell-rewritten' : 'llmdebug-cell-right';
}

export type Box = [x: number, y: number, width: number, height: number];

/** Return the lower part of a cell that stands for a share of its tokens: it can be seen. */
export function part([x, y, width, height]: Box, share: number): Box {
  const high = Math.min(height, Math.max(LEAST, Math.round(share * height)));
  return [x, y + height - high, width, high];
}

/**
 * Draw a cell: what has no partner is hatched, what is written otherwise is striped. It is filled
 * from below as far as its tokens differ: `share`.
 */
export function paint(
  context: CanvasRenderingContext2D,
  state: number,
  box: Box,
  paints: Paints,
  share = 1,
): void {
  if (state === NOTHING) return;
  const [x, y, width, height] = box;
  const isWrong = state === MADE || state === DIVERGED;
  if (!isWrong || share < 1) {
    context.fillStyle = paints.right;
    context.fillRect(...box);
  }
  if (isWrong) {
    context.fillStyle = state === MADE ? paints.made : paints.inherited;
    context.fillRect(...part(box, share));
  }
  if (state !== UNMATCHED && state !== REWRITTEN) return;
  const lean = state === UNMATCHED ? height : 0;
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = paints.line;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = x - lean; at < x + width; at += 5) {
    context.moveTo(at + 0.5, y + height);
    context.lineTo(at + lean + 0.5, y);
  }
  context.stroke();
  context.restore();
}
