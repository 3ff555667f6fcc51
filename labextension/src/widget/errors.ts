/** How large the differences of the elements are, and golden against mine. */
import { bars, BARS_HEIGHT } from './bars';
import { clamp, h, svg } from './dom';
import { figure, numeric } from './format';
import type { Ask } from './rpc';
import { Scatter } from './scatter';
import { T } from './strings';
import type { ErrorHistogram } from './wire';

const BINS = 64;
/** So many times the bars' own width at most, the limit lies beside them. */
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

  /** -1: there is nothing to compare. */
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
    const [lo, hi] = [numeric(errors.lo), numeric(errors.hi)];
    const { counts, same, broken, total } = errors;
    const width = (hi - lo) / counts.length;
    const size = (at: number) => figure(10 ** at, 3);
    const differing = total - same - broken;
    const limit = errors.limit === null ? NaN : numeric(errors.limit);
    const words = [
      T.differ(differing, total),
      broken ? T.brokenPairs(broken) : '',
      limit > 0 ? T.limitEach(figure(limit, 3)) : '',
    ]
      .filter(Boolean)
      .join(' · ');
    this.note.textContent = words;
    if (differing === 0) {
      this.plot.replaceChildren();
      return this.caption.replaceChildren();
    }
    const picture = bars(
      counts,
      `${T.errors}: ${T.bins(counts.length, size(lo), size(hi))}; ${words}`,
      Math.log1p,
      i => T.bin(size(lo + i * width), size(lo + (i + 1) * width), counts[i]!),
    );
    const at =
      limit > 0
        ? clamp(
            (Math.log10(limit) - lo) / width,
            -FARTHEST * counts.length,
            FARTHEST * counts.length,
          )
        : 0;
    const [from, to] = [Math.min(0, at - 1), Math.max(counts.length, at + 1)]; // the limit is in the picture
    picture.setAttribute('viewBox', `${from} 0 ${to - from} ${BARS_HEIGHT}`);
    if (limit > 0)
      picture.append(
        svg(
          'line',
          { class: 'llmdebug-limit-line', x1: at, x2: at, y1: 0, y2: BARS_HEIGHT },
          svg('title', {}, T.limitEach(figure(limit, 3))),
        ),
      );
    this.plot.replaceChildren(picture);
    this.caption.replaceChildren(
      h('span', {}, size(lo + from * width)),
      h('span', {}, T.errorScale),
      h('span', {}, size(lo + to * width)),
    );
  }
}
