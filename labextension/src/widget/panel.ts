/** The selected record: its site, verdict, neighbours, values, statistics and code. */
import { copyButton, kernelCode } from './copy';
import { button, h } from './dom';
import { figure, pathText, shapeText, slotText } from './format';
import { verdictBadge } from './header';
import { MarkForm, unmarkButton, type Marking } from './expected';
import type { Ask } from './rpc';
import { Sparklines } from './sparklines';
import { RELATIONS, SIDES, VERDICTS } from './strings';
import * as T from './strings';
import { Tensor, type Look } from './tensor';
import type { Detail, Flow, Overview, Row, Side } from './wire';

const FIGURES = [
  'dtype',
  'shape',
  'device',
  'min',
  'max',
  'mean',
  'l2norm',
  'nan',
  'inf',
  'zero',
  'numel',
  'fingerprint',
] as const;
type Figure = (typeof FIGURES)[number];
/** Figures in which any difference matters. The others may differ by rounding. */
const EXACT = new Set<Figure>(['dtype', 'shape', 'nan', 'inf', 'numel', 'fingerprint']);

/** Metrics that are always in view, with what each says. */
const FIRST = [
  ['relative_euclidean_distance', T.aboutL2],
  ['cosine_similarity', T.aboutCosine],
  ['max_absolute_error', T.aboutMax],
] as const;

export interface PanelEvents extends Pick<Marking, 'updated'> {
  overview: () => Overview;
  jump: (row: number) => void;
  tree: (path: string) => void;
  say: (text: string) => void;
  /** Called with the row that is shown. */
  shown: (row: Row) => void;
}

export class Panel {
  readonly root: HTMLElement;
  private tensor: Tensor;
  private sparklines: Sparklines;
  private place = h('div', { class: 'llmdebug-place' });
  private tables = h('div', { class: 'llmdebug-tables' });
  private kernels = h('div');
  private links = h('div');
  private first = h('div', { class: 'llmdebug-first' });
  private more = h('details', { class: 'llmdebug-more', 'data-open': 'more' });
  private content: HTMLElement;
  private hint = h('div', { class: 'llmdebug-hint' }, h('p', {}, T.chooseRow), h('p', {}, T.keys));
  private asked = 0;
  private mark: MarkForm | null = null;

  /** `report`: the pictures come first, and most figures are folded. */
  constructor(
    private ask: Ask,
    private report: boolean,
    private stepLabel: (index: number) => string,
    private events: PanelEvents,
  ) {
    this.tensor = new Tensor(ask, report);
    this.sparklines = new Sparklines(ask, { jump: events.jump, step: stepLabel });
    const { place, first, tensor, sparklines, tables, kernels, more } = this;
    this.content = h(
      'div',
      { class: `llmdebug-detail${report ? ' llmdebug-brief' : ''}`, hidden: true },
      ...(report
        ? [place, tensor.root, first, kernels, more]
        : [place, sparklines.root, tensor.root, tables, kernels]),
    );
    if (report)
      more.append(h('summary', {}, T.more), this.links, tensor.figures, sparklines.root, tables);
    this.root = h(
      'section',
      { class: 'llmdebug-panel', 'aria-label': T.panel, tabindex: report ? 0 : undefined },
      this.hint,
      this.content,
    );
  }

  get look(): Look {
    return this.tensor.look;
  }

  begin(look: Look): void {
    this.tensor.begin(look);
  }

  async show(row: number): Promise<void> {
    const asked = ++this.asked;
    const detail = row >= 0 ? (await this.ask('detail', { row }))?.answer : undefined;
    if (asked !== this.asked) return;
    this.hint.hidden = detail !== undefined;
    this.content.hidden = detail === undefined;
    if (!detail) return;
    const [place, links] = this.placeOf(detail);
    this.place.replaceChildren(...place);
    this.links.replaceChildren(...links);
    if (!this.report) this.place.append(...links);
    this.first.replaceChildren(...this.firstOf(detail));
    this.kernels.replaceChildren(...this.kernelsOf(detail));
    this.tables.replaceChildren(...tablesOf(detail), ...this.codesOf(detail));
    this.tensor.show(detail);
    this.events.shown(detail.row);
    void this.sparklines.show(row, detail.row.step);
  }

  focus(): void {
    this.root.focus();
  }

  /** Open the form that marks this record, or focus the button that removes its mark. */
  expect(): void {
    this.more.open = true;
    const button = this.content.querySelector<HTMLElement>('[data-mark]');
    if (this.mark) this.mark.turn(true);
    else if (button) button.focus();
    else this.events.say(T.nothingToMark);
  }

  dispose(): void {
    this.tensor.dispose();
  }

  /** Return the lines on the place of a record, and those on its neighbours. */
  private placeOf({
    row,
    sides,
    producer,
    producer_label,
    flow,
  }: Detail): [HTMLElement[], HTMLElement[]] {
    const name = this.link(pathText(row.path), () => this.events.tree(row.path), T.showInTree);
    const place = T.place(row.seq, this.stepLabel(row.step), row.call);
    const what = `${row.op} · ${row.dtype} ${shapeText(row.shape)} · ${place}`;
    const made = this.link(producer_label, () => this.events.jump(producer));
    made.classList.add('llmdebug-producer');
    const places = [
      h('h3', {}, name, ' ', h('span', { class: 'llmdebug-slot' }, slotText(row))),
      h('div', { class: 'llmdebug-dim' }, `${what}${T.callId(sides[0]?.call_id ?? '')}`),
      ...sides
        .filter(side => side.part && side.which !== 'difference')
        .map(side => h('div', { class: 'llmdebug-part' }, owner(sides, side), T.part(side.part))),
      row.verdict ? verdictLine(row) : null,
    ];
    const links = [
      this.marking(row),
      producer >= 0 ? h('div', {}, `${T.producer} `, made) : null,
      ...flow.map(one => this.flowOf(one)),
    ];
    return [places, links].map(lines => lines.filter(line => line !== null)) as [
      HTMLElement[],
      HTMLElement[],
    ];
  }

  /** The figures that say most; the others are folded. */
  private firstOf({ metrics }: Detail): HTMLElement[] {
    return FIRST.flatMap(([name, says]) => {
      const metric = metrics.find(one => one.name === name);
      if (!metric) return [];
      return [
        h('span', { title: says }, `${T.metricName(name)} `, h('b', {}, figure(metric.value))),
      ];
    });
  }

  private link(text: string, follow: () => void, title?: string): HTMLElement {
    return button(follow, { class: 'llmdebug-link', title }, text);
  }

  private marking(row: Row): HTMLElement | null {
    const marking = { ask: this.ask, updated: this.events.updated };
    const isMismatch = row.verdict === 'diverged' || row.verdict === 'unmatched';
    this.mark = isMismatch ? new MarkForm({ row: row.id }, 'row', marking) : null;
    if (this.mark) return this.mark.root;
    const overview = this.events.overview();
    return overview.marks[row.mark] ? unmarkButton(overview, row.mark, 'row', marking) : null;
  }

  private flowOf({ relation, links, total }: Flow): HTMLElement {
    const more = total - links.length;
    return h(
      'div',
      { class: 'llmdebug-flow', 'data-relation': relation },
      h('span', {}, `${RELATIONS[relation]} `),
      h(
        'ul',
        { 'aria-label': RELATIONS[relation] },
        ...links.map(({ row, label }) =>
          h(
            'li',
            {},
            this.link(label, () => this.events.jump(row)),
          ),
        ),
        more > 0 ? h('li', { class: 'llmdebug-dim' }, T.moreLinks(more)) : null,
      ),
    );
  }

  /** The kernels of compiled code that compute this tensor, unfolded if it diverged. */
  private kernelsOf({ row, sides }: Detail): HTMLElement[] {
    return sides.flatMap(side => {
      const { kernel } = side;
      if (!kernel) return [];
      const title = [owner(sides, side), `${T.kernel} `, h('code', {}, kernel.name)];
      const nodes = `${T.kernelNodes(kernel.nodes.length)} ${kernel.nodes.join(', ')}`;
      return [
        h(
          'details',
          { class: 'llmdebug-kernel', open: row.verdict === 'diverged' },
          h('summary', {}, ...title),
          h('div', { class: 'llmdebug-dim' }, nodes),
          kernel.code
            ? kernelCode(kernel.code, this.events.say)
            : h('div', { class: 'llmdebug-dim' }, T.noKernelCode),
        ),
      ];
    });
  }

  private codesOf({ sides }: Detail): HTMLElement[] {
    return sides
      .filter(side => side.code)
      .map(side =>
        h(
          'div',
          { class: 'llmdebug-code' },
          copyButton(T.copy, side.code, this.events.say),
          h('code', {}, side.code),
        ),
      );
  }
}

/** Return whose tensor it is, where there are several. */
function owner(sides: Side[], side: Side): string {
  return sides.length > 1 ? `${SIDES[side.which]}: ` : '';
}

function verdictLine(row: Row): HTMLElement {
  return h(
    'div',
    {},
    verdictBadge(row.verdict!),
    ' ',
    row.error === null ? null : T.errorLimit(figure(row.error), figure(row.limit)),
    row.differing
      ? h(
          'div',
          { class: 'llmdebug-differing', title: T.differingHint },
          T.differing(row.differing),
        )
      : null,
    row.expected
      ? h('div', { class: 'llmdebug-reason' }, `${VERDICTS.expected.text}: ${row.expected}`)
      : null,
    row.reason && row.reason !== row.expected
      ? h('div', { class: 'llmdebug-reason' }, row.reason)
      : null,
  );
}

function text(side: Side, name: Figure): string {
  if (name === 'shape') return shapeText(side.shape);
  const value = side[name];
  return typeof value === 'string' || value === null ? value || '–' : figure(value);
}

function tablesOf({ sides, metrics }: Detail): HTMLElement[] {
  const heads =
    sides.length > 1
      ? [h('tr', {}, h('td'), ...sides.map(side => h('th', { scope: 'col' }, SIDES[side.which])))]
      : [];
  const summary = h(
    'table',
    { class: 'llmdebug-table llmdebug-summary' },
    h('caption', {}, T.summary),
    ...heads,
    ...FIGURES.map(name =>
      h(
        'tr',
        { class: differs(sides, name) ? 'llmdebug-differs' : '' },
        h('th', { scope: 'row' }, name),
        ...sides.map(side => h('td', { title: String(side[name] ?? '') }, text(side, name))),
      ),
    ),
  );
  if (metrics.length === 0) return [summary];
  return [
    h(
      'table',
      { class: 'llmdebug-table llmdebug-metrics' },
      h('caption', {}, T.metrics),
      ...metrics.map(metric =>
        h(
          'tr',
          {},
          h('th', { scope: 'row', title: T.aboutMetrics[metric.name] }, metric.name),
          h('td', {}, figure(metric.value)),
        ),
      ),
    ),
    summary,
  ];
}

function differs(sides: Side[], name: Figure): boolean {
  const [golden, mine] = ['golden', 'mine'].map(which => sides.find(side => side.which === which));
  return (
    EXACT.has(name) &&
    golden !== undefined &&
    mine !== undefined &&
    text(golden, name) !== text(mine, name)
  );
}
