/** How the values of the whole tensor are spread. */
import { bars } from './bars';
import { h } from './dom';
import { figure, numeric } from './format';
import type { Ask } from './rpc';
import { T } from './strings';
import type { Histogram as Counts, HistogramRequest } from './wire';

const BINS = 64;

export class Histogram {
  readonly root: HTMLElement;
  private plot = h('div', { class: 'llmdebug-plot' });
  private caption = h('div', { class: 'llmdebug-caption' });
  private log = h('input', { type: 'checkbox', onchange: () => this.paint() });
  private counts: Counts | null = null;
  private asked = 0;

  constructor(private ask: Ask) {
    this.root = h(
      'figure',
      { class: 'llmdebug-histogram' },
      h('figcaption', {}, T.histogram, h('label', {}, this.log, T.log)),
      this.plot,
      this.caption,
    );
  }

  async show(row: number, which: HistogramRequest['which']): Promise<void> {
    const asked = ++this.asked;
    const reply = await this.ask('histogram', { row, which, bins: BINS });
    if (asked !== this.asked) return;
    this.counts = reply?.answer ?? null;
    this.paint();
  }

  private paint(): void {
    const { counts } = this;
    this.caption.hidden = !counts;
    if (!counts) return this.plot.replaceChildren();
    const lo = numeric(counts.lo);
    const width = (numeric(counts.hi) - lo) / Math.max(1, counts.counts.length);
    const rise = (n: number) => (this.log.checked ? Math.log1p(n) : n);
    this.plot.replaceChildren(
      bars(
        counts.counts,
        `${T.histogram}: ${T.bins(counts.counts.length, figure(counts.lo), figure(counts.hi))}`,
        rise,
        i => T.bin(figure(lo + i * width), figure(lo + (i + 1) * width), counts.counts[i]!),
      ),
    );
    const finite = counts.counts.reduce((sum, n) => sum + n, 0);
    const broken = [
      counts.nan ? `NaN ${counts.nan}` : '',
      counts.inf ? `inf ${counts.inf}` : '',
    ].filter(Boolean);
    this.caption.replaceChildren(
      h('span', {}, figure(counts.lo)),
      h('span', {}, [T.finite(finite), ...broken].join(' · ')),
      h('span', {}, figure(counts.hi)),
    );
  }
}
