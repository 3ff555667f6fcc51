/** The histogram of all values of a tensor. */
import { bars } from './bars';
import { h } from './dom';
import { figure, numeric } from './format';
import type { Ask } from './rpc';
import * as T from './strings';
import type { Histogram as Answer, HistogramRequest } from './wire';

const BINS = 64;

export class Histogram {
  readonly root: HTMLElement;
  private plot = h('div', { class: 'llmdebug-plot' });
  private caption = h('div', { class: 'llmdebug-caption' });
  private log = h('input', { type: 'checkbox', onchange: () => this.paint() });
  private answer: Answer | null = null;
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
    this.answer = reply?.answer ?? null;
    this.paint();
  }

  private paint(): void {
    this.caption.hidden = !this.answer;
    if (!this.answer) return this.plot.replaceChildren();
    const { counts, nan, inf, ...range } = this.answer;
    const [lo, hi] = [numeric(range.lo), numeric(range.hi)];
    const edge = (bin: number) => figure(lo + (bin * (hi - lo)) / Math.max(1, counts.length));
    const label = `${T.histogram}: ${T.bins(counts.length, figure(range.lo), figure(range.hi))}`;
    const rise = (n: number) => (this.log.checked ? Math.log1p(n) : n);
    const title = (bin: number) => T.bin(edge(bin), edge(bin + 1), counts[bin]!);
    this.plot.replaceChildren(bars(counts, label, rise, title));
    const finite = counts.reduce((sum, n) => sum + n, 0);
    this.caption.replaceChildren(
      h('span', {}, figure(range.lo)),
      h('span', {}, [T.finite(finite), ...T.notFinite(nan, inf)].join(' · ')),
      h('span', {}, figure(range.hi)),
    );
  }
}
