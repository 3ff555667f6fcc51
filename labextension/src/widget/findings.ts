/** The findings of a report. A click on one selects its row; its details can be opened. */
import { copyButton, kernelCode, type Say } from './copy';
import { button, h, uniqueId } from './dom';
import { pathText } from './format';
import { line, sourceViews } from './sources';
import { MarkForm, unmarkButton, type Marking } from './expected';
import type { Ask } from './rpc';
import { VERDICTS } from './strings';
import * as T from './strings';
import type { FindingDetail, FindingView, Overview } from './wire';

export interface FindingEvents extends Pick<Marking, 'updated'> {
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
  private complete = false;
  private body = h('div', { class: 'llmdebug-finding-body', id: this.uid, hidden: true });
  private toggle = button(
    () => void this.turn(),
    { 'aria-expanded': 'false', 'aria-controls': this.uid },
    T.details,
  );

  constructor(
    private overview: Overview,
    private at: number,
    private ask: Ask,
    private events: FindingEvents,
  ) {
    this.finding = overview.findings[at]!;
    const marking = { ask, updated: events.updated };
    const mark =
      this.finding.mark >= 0
        ? unmarkButton(overview, this.finding.mark, `finding-${at}`, marking)
        : new MarkForm({ finding: at }, `finding-${at}`, marking).root;
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

  /** Open or close the details. Code may be long, so it is fetched at the first opening. */
  private async turn(): Promise<void> {
    this.body.hidden = !this.body.hidden;
    this.toggle.setAttribute('aria-expanded', String(!this.body.hidden));
    if (this.body.hidden || this.complete) return;
    this.body.replaceChildren(...this.words());
    const reply = await this.ask('finding', { finding: this.at });
    if (!reply) return; // the next opening tries again
    this.complete = true;
    this.body.replaceChildren(...this.words(), ...this.code(reply.answer));
  }

  private link(finding: FindingView, more?: HTMLElement): HTMLElement {
    const known = finding.expected ? ' llmdebug-known' : '';
    const { mark, text } = VERDICTS.expected;
    return button(
      () => this.events.jump(finding.row),
      { class: `llmdebug-finding${known}` },
      known &&
        h(
          'span',
          { class: 'llmdebug-verdict llmdebug-expected' },
          `${mark} ${text}: ${finding.expected} `,
        ),
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
    const { summary, findings } = this.overview;
    const lines: [string, string][] = [
      [T.cause, cause],
      [T.where, `${pathText(path)} (${op}), ${this.step(this.finding)}`],
      [T.evidence, evidence],
    ];
    if (this.at === 0 && summary) lines.push([T.inShort, summary]); // it describes the first one
    const others = findings.filter(one => one !== this.finding);
    const links = others.map(one => h('li', {}, this.link(one)));
    return [
      h('dl', {}, ...lines.flatMap(([name, text]) => [h('dt', {}, name), h('dd', {}, text)])),
      ...(links.length
        ? [h('div', {}, T.others), h('ul', { class: 'llmdebug-others' }, ...links)]
        : []),
    ];
  }

  private code(detail: FindingDetail): HTMLElement[] {
    const { script, why, save, kernel, code } = detail;
    const { say } = this.events;
    const origin = sourceViews(detail);
    if (kernel) origin.push(line(`${T.computedBy} `, h('code', {}, kernel)));
    if (code) origin.push(kernelCode(code, say));
    if (!script) return [...origin, h('div', { class: 'llmdebug-why' }, T.noScript(why))];
    const pre = h('pre', { class: 'llmdebug-script', tabindex: 0, 'aria-label': T.script }, script);
    return [
      ...origin,
      h('div', { class: 'llmdebug-code' }, copyButton(T.copyLine, save, say), h('code', {}, save)),
      h('div', { class: 'llmdebug-code' }, copyButton(T.copyScript, script, say), pre),
    ];
  }
}
