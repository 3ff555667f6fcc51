/** What is to blame: each finding leads to its row, and opens to all that is known of it. */
import { copyButton, kernelCode, type Say } from './copy';
import { h, uniqueId } from './dom';
import { pathText } from './format';
import { MarkForm, unmarkButton, type Judged } from './expected';
import type { Ask } from './rpc';
import { T, VERDICTS } from './strings';
import type { FindingDetail, FindingView, Overview } from './wire';

export interface FindingEvents extends Pick<Judged, 'took'> {
  jump: (row: number) => void;
  say: Say;
}

export function findingList(overview: Overview, ask: Ask, events: FindingEvents): HTMLElement {
  const { findings } = overview;
  return h(
    'details',
    { class: 'llmdebug-findings', open: true, 'data-open': 'findings' },
    h('summary', {}, T.findings(findings.length)),
    h('ul', {}, ...findings.map((_, at) => new Finding(overview, at, ask, events).root)),
  );
}

class Finding {
  readonly root: HTMLElement;
  private finding: FindingView;
  private uid = uniqueId();
  private whole = false;
  private body = h('div', { class: 'llmdebug-finding-body', id: this.uid, hidden: true });
  private toggle = h(
    'button',
    {
      class: 'llmdebug-button',
      type: 'button',
      'aria-expanded': 'false',
      'aria-controls': this.uid,
      onclick: () => void this.turn(),
    },
    T.details,
  );

  constructor(
    private overview: Overview,
    private at: number,
    private ask: Ask,
    private events: FindingEvents,
  ) {
    this.finding = overview.findings[at]!;
    const judged = { ask, took: events.took };
    const mark =
      this.finding.mark >= 0
        ? unmarkButton(overview, this.finding.mark, `finding-${at}`, judged)
        : new MarkForm({ finding: at }, `finding-${at}`, judged).root;
    this.root = h(
      'li',
      {},
      h(
        'div',
        { class: 'llmdebug-finding-head' },
        this.link(this.finding, h('span', { class: 'llmdebug-evidence' }, this.finding.evidence)),
        mark,
        this.toggle,
      ),
      this.body,
    );
  }

  /** The script may be long: it is asked for when the finding is opened for the first time. */
  private async turn(): Promise<void> {
    this.body.hidden = !this.body.hidden;
    this.toggle.setAttribute('aria-expanded', String(!this.body.hidden));
    if (this.body.hidden || this.whole) return;
    this.body.replaceChildren(...this.words());
    const reply = await this.ask('finding', { finding: this.at });
    if (!reply) return; // asked for again when it is opened again
    this.whole = true;
    this.body.replaceChildren(...this.words(), ...this.code(reply.answer));
  }

  private link(finding: FindingView, more?: HTMLElement): HTMLElement {
    return h(
      'button',
      {
        class: `llmdebug-finding${finding.expected ? ' llmdebug-known' : ''}`,
        type: 'button',
        onclick: () => this.events.jump(finding.row),
      },
      finding.expected
        ? h(
            'span',
            { class: 'llmdebug-verdict llmdebug-expected' },
            `${VERDICTS.expected.mark} ${VERDICTS.expected.text}: ${finding.expected} `,
          )
        : null,
      h('b', {}, finding.cause),
      ' ',
      h('code', {}, pathText(finding.path)),
      ' ',
      h('span', { class: 'llmdebug-dim' }, `${finding.op} · ${this.step(finding)}`),
      more,
    );
  }

  private step(finding: FindingView): string {
    return T.findingStep(this.overview.steps[finding.step]?.label ?? String(finding.step));
  }

  private words(): HTMLElement[] {
    const { path, op, cause, evidence } = this.finding;
    const others = this.overview.findings.filter(one => one !== this.finding);
    const lines: [string, string][] = [
      [T.cause, cause],
      [T.where, `${pathText(path)} (${op}), ${this.step(this.finding)}`],
      [T.evidence, evidence],
    ];
    if (this.at === 0 && this.overview.summary) lines.push([T.inShort, this.overview.summary]); // it speaks of the first one
    return [
      h('dl', {}, ...lines.flatMap(([name, text]) => [h('dt', {}, name), h('dd', {}, text)])),
      ...(others.length
        ? [
            h('div', {}, T.others),
            h(
              'ul',
              { class: 'llmdebug-others' },
              ...others.map(one => h('li', {}, this.link(one))),
            ),
          ]
        : []),
    ];
  }

  private code({ script, why, save, source, kernel, code }: FindingDetail): HTMLElement[] {
    const called: HTMLElement[] = source
      ? [h('div', { class: 'llmdebug-source' }, `${T.calledAt} ${source}`)]
      : [];
    if (kernel)
      called.push(
        h('div', { class: 'llmdebug-source' }, `${T.computedBy} `, h('code', {}, kernel)),
      );
    if (code) called.push(kernelCode(code, this.events.say));
    if (!script) return [...called, h('div', { class: 'llmdebug-why' }, T.noScript(why))];
    return [
      ...called,
      h(
        'div',
        { class: 'llmdebug-code' },
        copyButton(T.copyLine, save, this.events.say),
        h('code', {}, save),
      ),
      h(
        'div',
        { class: 'llmdebug-code' },
        copyButton(T.copyScript, script, this.events.say),
        h('pre', { class: 'llmdebug-script', tabindex: 0, 'aria-label': T.script }, script),
      ),
    ];
  }
}
