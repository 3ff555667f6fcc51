/** The title; for a report also verdict, findings and marks. */
import { button, h } from './dom';
import { markList } from './expected';
import { findingList, type FindingEvents } from './findings';
import type { Ask } from './rpc';
import { VERDICTS } from './strings';
import * as T from './strings';
import type { Overview, Verdict } from './wire';

export function verdictBadge(verdict: Verdict): HTMLElement {
  const { mark, text } = VERDICTS[verdict];
  return h('span', { class: `llmdebug-verdict llmdebug-${verdict}` }, `${mark} ${text}`);
}

export function header(overview: Overview, ask: Ask, events: FindingEvents): HTMLElement {
  const { title, verdict, caution, lines, notes, findings, first_bad } = overview;
  return h(
    'header',
    { class: 'llmdebug-header' },
    h(
      'div',
      { class: 'llmdebug-title' },
      h('h2', {}, title),
      verdict && verdictBadge(verdict),
      caution ? h('span', { class: 'llmdebug-caution' }, caution) : null,
      first_bad >= 0
        ? button(
            () => events.jump(first_bad),
            { class: 'llmdebug-button llmdebug-first-bad' },
            T.firstBad,
          )
        : null,
    ),
    ...lines.map(line => h('div', { class: 'llmdebug-line' }, line)),
    findings.length ? findingList(overview, ask, events) : null,
    overview.marks.length ? markList(overview, { ask, updated: events.updated }) : null,
    ...notes.map(note => h('div', { class: 'llmdebug-note' }, note)),
  );
}
