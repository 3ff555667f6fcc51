/** Everything about the selected record: where it is, its figures on each side, its values, its code. */
import { copyButton, kernelCode } from './copy';
import { h } from './dom';
import { figure, pathText, shapeText, slotText } from './format';
import { verdictBadge } from './header';
import { MarkForm, unmarkButton, type Judged } from './expected';
import type { Ask } from './rpc';
import { Sparklines } from './sparklines';
import { RELATIONS, SIDES, T, VERDICTS } from './strings';
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
/** Where any difference matters; the others differ by rounding. */
const EXACT = new Set<Figure>(['dtype', 'shape', 'nan', 'inf', 'numel', 'fingerprint']);

export interface PanelEvents extends Pick<Judged, 'took'> {
  overview: () => Overview;
  jump: (row: number) => void;
  tree: (path: string) => void;
  say: (text: string) => void;
}

export class Panel {
  readonly root: HTMLElement;
  private tensor: Tensor;
  private sparklines: Sparklines;
  private place = h('div', { class: 'llmdebug-place' });
  private tables = h('div', { class: 'llmdebug-tables' });
  private content: HTMLElement;
  private hint = h('div', { class: 'llmdebug-hint' }, h('p', {}, T.chooseRow), h('p', {}, T.keys));
  private row = -1;
  private mark: MarkForm | null = null;

  constructor(
    private ask: Ask,
    private stepLabel: (index: number) => string,
    private events: PanelEvents,
  ) {
    this.tensor = new Tensor(ask);
    this.sparklines = new Sparklines(ask, { jump: events.jump, step: stepLabel });
    this.content = h(
      'div',
      { class: 'llmdebug-detail', hidden: true },
      this.place,
      this.sparklines.root,
      this.tensor.root,
      this.tables,
    );
    this.root = h(
      'section',
      { class: 'llmdebug-panel', 'aria-label': T.panel },
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
    this.row = row;
    const detail = row >= 0 ? (await this.ask('detail', { row }))?.answer : undefined;
    if (row !== this.row) return;
    this.hint.hidden = detail !== undefined;
    this.content.hidden = detail === undefined;
    if (!detail) return;
    this.place.replaceChildren(...this.placeOf(detail));
    this.tables.replaceChildren(
      ...tablesOf(detail),
      ...this.kernelsOf(detail),
      ...this.codesOf(detail),
    );
    this.tensor.show(detail);
    void this.sparklines.show(row, detail.row.step);
  }

  /** By key: open the form that marks this record, or go to the button that takes its mark back. */
  expect(): void {
    const button = this.place.querySelector<HTMLElement>('[data-mark]');
    if (this.mark) this.mark.turn(true);
    else if (button) button.focus();
    else this.events.say(T.nothingToMark);
  }

  dispose(): void {
    this.tensor.dispose();
  }

  private placeOf({ row, sides, producer, producer_label, flow }: Detail): HTMLElement[] {
    const name = h(
      'button',
      {
        class: 'llmdebug-link',
        type: 'button',
        title: T.showInTree,
        onclick: () => this.events.tree(row.path),
      },
      pathText(row.path),
    );
    const lines: HTMLElement[] = [
      h('h3', {}, name, ' ', h('span', { class: 'llmdebug-slot' }, slotText(row))),
      h(
        'div',
        { class: 'llmdebug-dim' },
        `${row.op} · ${row.dtype} ${shapeText(row.shape)} · ${T.place(row.seq, this.stepLabel(row.step), row.call)}${T.callId(sides[0]?.call_id ?? '')}`,
      ),
    ];
    for (const side of sides) {
      const whose = sides.length > 1 ? `${SIDES[side.which]}: ` : '';
      if (side.part && side.which !== 'difference')
        lines.push(h('div', { class: 'llmdebug-part' }, whose + T.part(side.part)));
    }
    if (row.verdict) lines.push(verdictLine(row));
    const marking = this.marking(row);
    if (marking) lines.push(marking);
    if (producer >= 0)
      lines.push(
        h(
          'div',
          {},
          `${T.producer} `,
          h(
            'button',
            {
              class: 'llmdebug-link llmdebug-producer',
              type: 'button',
              onclick: () => this.events.jump(producer),
            },
            producer_label,
          ),
        ),
      );
    return [...lines, ...flow.map(one => this.flowOf(one))];
  }

  private marking(row: Row): HTMLElement | null {
    const judged = { ask: this.ask, took: this.events.took };
    this.mark =
      row.verdict === 'diverged' || row.verdict === 'unmatched'
        ? new MarkForm({ row: row.id }, 'row', judged)
        : null;
    if (this.mark) return this.mark.root;
    return row.mark >= 0 && this.events.overview().marks[row.mark]
      ? unmarkButton(this.events.overview(), row.mark, 'row', judged)
      : null;
  }

  private flowOf({ relation, links, total }: Flow): HTMLElement {
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
            h(
              'button',
              { class: 'llmdebug-link', type: 'button', onclick: () => this.events.jump(row) },
              label,
            ),
          ),
        ),
        total > links.length
          ? h('li', { class: 'llmdebug-dim' }, T.moreLinks(total - links.length))
          : null,
      ),
    );
  }

  /** What computes this tensor in compiled code, open where it computes it wrongly. */
  private kernelsOf({ row, sides }: Detail): HTMLElement[] {
    return sides.flatMap(({ which, kernel }) =>
      kernel === null
        ? []
        : [
            h(
              'details',
              { class: 'llmdebug-kernel', open: row.verdict === 'diverged' },
              h(
                'summary',
                {},
                sides.length > 1 ? `${SIDES[which]}: ` : '',
                `${T.kernel} `,
                h('code', {}, kernel.name),
              ),
              h(
                'div',
                { class: 'llmdebug-dim' },
                `${T.kernelNodes(kernel.nodes.length)} ${kernel.nodes.join(', ')}`,
              ),
              kernel.code
                ? kernelCode(kernel.code, this.events.say)
                : h('div', { class: 'llmdebug-dim' }, T.noKernelCode),
            ),
          ],
    );
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

function verdictLine(row: Row): HTMLElement {
  return h(
    'div',
    {},
    verdictBadge(row.verdict!),
    ' ',
    row.error === null ? null : T.errorLimit(figure(row.error), figure(row.limit)),
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
        h('tr', {}, h('th', { scope: 'row' }, metric.name), h('td', {}, figure(metric.value))),
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
