/** How the values of the whole tensor are spread. */
import { h, svg } from './dom';
import { figure, numeric } from './format';
import type { Ask } from './rpc';
import { T } from './strings';
import type { Histogram as Counts, HistogramRequest } from './wire';

const BINS = 64;
const HEIGHT = 64;

export class Histogram {
  readonly root: HTMLElement;
  private plot = h('div', { class: 'llmdebug-plot' });
  private caption = h('div', { class: 'llmdebug-caption' });
  private log = h('input', { type: 'checkbox', onchange: () => this.paint() });
  private counts: Counts | null = null;
  private asked = 0;

  constructor(private ask: Ask) {
    this.root = h('figure', { class: 'llmdebug-histogram' },
      h('figcaption', {}, T.histogram, h('label', {}, this.log, T.log)), this.plot, this.caption);
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
    const top = rise(Math.max(1, ...counts.counts));
    const picture = svg('svg', { viewBox: `0 0 ${counts.counts.length || 1} ${HEIGHT}`, preserveAspectRatio: 'none', role: 'img',
      'aria-label': `${T.histogram}: ${T.bins(counts.counts.length, figure(counts.lo), figure(counts.hi))}` });
    counts.counts.forEach((n, i) => {
      const height = n ? Math.max(1, (rise(n) / top) * HEIGHT) : 0;
      const title = svg('title', {}, T.bin(figure(lo + i * width), figure(lo + (i + 1) * width), n));
      picture.append(svg('rect', { x: i, y: HEIGHT - height, width: 0.9, height }, title));
    });
    this.plot.replaceChildren(picture);
    const finite = counts.counts.reduce((sum, n) => sum + n, 0);
    const broken = [counts.nan ? `NaN ${counts.nan}` : '', counts.inf ? `inf ${counts.inf}` : ''].filter(Boolean);
    this.caption.replaceChildren(
      h('span', {}, figure(counts.lo)),
      h('span', {}, [T.finite(finite), ...broken].join(' · ')),
      h('span', {}, figure(counts.hi)));
  }
}
