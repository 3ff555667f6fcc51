/** The distribution of elementwise differences, and a scatter plot of golden against mine. */
import { bars, BARS_HEIGHT } from './bars';
import { clamp, h, svg } from './dom';
import { figure, numeric } from './format';
import type { Ask } from './rpc';
import { Scatter } from './scatter';
import * as T from './strings';
import type { ErrorHistogram } from './wire';

const BINS = 64;
/** The limit is drawn at most this many widths of the histogram away from it. */
const FARTHEST = 3;

export class Errors {
  readonly root: HTMLElement;
  private plot = h('div', { class: 'llmdebug-plot' });
  private caption = h('div', { class: 'llmdebug-caption' });
  private note = h('div', { class: 'llmdebug-dim llmdebug-marks' });
  private scatter: Scatter;
  private asked = 0;

  constructor(private ask: Ask) {
    this.scatter = new Scatter(ask);
    this.root = h(
      'div',
      { class: 'llmdebug-errors', hidden: true },
      h(
        'figure',
        { class: 'llmdebug-error-histogram' },
        h('figcaption', {}, T.errors),
        this.plot,
        this.caption,
        this.note,
      ),
      this.scatter.root,
    );
  }

  /** `row` -1: there is no difference to show. */
  async show(row: number): Promise<void> {
    const asked = ++this.asked;
    void this.scatter.show(row);
    const answer = row < 0 ? undefined : (await this.ask('errors', { row, bins: BINS }))?.answer;
    if (asked !== this.asked) return;
    this.root.hidden = !answer;
    if (answer) this.paint(answer);
  }

  dispose(): void {
    this.scatter.dispose();
  }

  private paint(errors: ErrorHistogram): void {
    const { counts, same, broken, total } = errors;
    const differing = total - same - broken;
    const limit = errors.limit === null ? NaN : numeric(errors.limit);
    const notes = [
      T.differ(differing, total),
      broken ? T.brokenPairs(broken) : '',
      limit > 0 ? T.limitEach(figure(limit, 3)) : '',
    ];
    this.note.textContent = notes.filter(Boolean).join(' · ');
    this.plot.replaceChildren();
    this.caption.replaceChildren();
    if (differing === 0) return;
    const [lo, hi] = [numeric(errors.lo), numeric(errors.hi)];
    const width = (hi - lo) / counts.length;
    const size = (bin: number) => figure(10 ** (lo + bin * width), 3);
    const bins = T.bins(counts.length, size(0), size(counts.length));
    const label = `${T.errors}: ${bins}; ${this.note.textContent}`;
    const title = (bin: number) => T.bin(size(bin), size(bin + 1), counts[bin]!);
    const picture = bars(counts, label, Math.log1p, title);
    const [from, to] = addLimit(picture, limit, lo, width, counts.length);
    this.plot.append(picture);
    this.caption.append(
      h('span', {}, size(from)),
      h('span', {}, T.errorScale),
      h('span', {}, size(to)),
    );
  }
}

/** Draw the limit into a histogram of `bins` bars. Return the first and last bin in view. */
function addLimit(
  picture: SVGElement,
  limit: number,
  lo: number,
  width: number,
  bins: number,
): [number, number] {
  if (!(limit > 0)) return [0, bins];
  const x = clamp((Math.log10(limit) - lo) / width, -FARTHEST * bins, FARTHEST * bins);
  const line = { class: 'llmdebug-limit-line', x1: x, x2: x, y1: 0, y2: BARS_HEIGHT };
  picture.append(svg('line', line, svg('title', {}, T.limitEach(figure(limit, 3)))));
  const [from, to] = [Math.min(0, x - 1), Math.max(bins, x + 1)];
  picture.setAttribute('viewBox', `${from} 0 ${to - from} ${BARS_HEIGHT}`);
  return [from, to];
}
