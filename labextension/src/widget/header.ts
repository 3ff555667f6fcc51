/** What this is, and for a report what came out and what is to blame. */
import { h } from './dom';
import { pathText } from './format';
import { T, VERDICTS } from './strings';
import type { FindingView, Overview, Verdict } from './wire';

export function verdictBadge(verdict: Verdict): HTMLElement {
  const { mark, text } = VERDICTS[verdict];
  return h('span', { class: `llmdebug-verdict llmdebug-${verdict}` }, `${mark} ${text}`);
}

export function header(overview: Overview, jump: (row: number) => void): HTMLElement {
  const { title, verdict, lines, notes, findings, first_bad } = overview;
  return h('header', { class: 'llmdebug-header' },
    h('div', { class: 'llmdebug-title' },
      h('h2', {}, title),
      verdict && verdictBadge(verdict),
      first_bad >= 0
        ? h('button', { class: 'llmdebug-button llmdebug-first-bad', type: 'button', onclick: () => jump(first_bad) }, T.firstBad)
        : null),
    ...lines.map(line => h('div', { class: 'llmdebug-line' }, line)),
    findings.length ? findingList(overview, jump) : null,
    ...notes.map(note => h('div', { class: 'llmdebug-note' }, note)));
}

function findingList({ findings, steps }: Overview, jump: (row: number) => void): HTMLElement {
  const label = (finding: FindingView) => steps.find(step => step.index === finding.step)?.label ?? String(finding.step);
  return h('details', { class: 'llmdebug-findings', open: true },
    h('summary', {}, T.findings(findings.length)),
    h('ul', {}, ...findings.map(finding =>
      h('li', {},
        h('button', { class: 'llmdebug-finding', type: 'button', onclick: () => jump(finding.row) },
          h('b', {}, finding.cause), ' ',
          h('code', {}, pathText(finding.path)), ' ',
          h('span', { class: 'llmdebug-dim' }, `${finding.op} · ${T.findingStep(label(finding))}`),
          h('span', { class: 'llmdebug-evidence' }, finding.evidence))))));
}
