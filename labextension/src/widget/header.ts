/** What this is, and for a report what came out and what is to blame. */
import { h } from './dom';
import { markList } from './expected';
import { findingList, type FindingEvents } from './findings';
import type { Ask } from './rpc';
import { T, VERDICTS } from './strings';
import type { Overview, Verdict } from './wire';

export function verdictBadge(verdict: Verdict): HTMLElement {
  const { mark, text } = VERDICTS[verdict];
  return h('span', { class: `llmdebug-verdict llmdebug-${verdict}` }, `${mark} ${text}`);
}

export function header(overview: Overview, ask: Ask, events: FindingEvents): HTMLElement {
  const { title, verdict, lines, notes, findings, first_bad } = overview;
  return h(
    'header',
    { class: 'llmdebug-header' },
    h(
      'div',
      { class: 'llmdebug-title' },
      h('h2', {}, title),
      verdict && verdictBadge(verdict),
      first_bad >= 0
        ? h(
            'button',
            {
              class: 'llmdebug-button llmdebug-first-bad',
              type: 'button',
              onclick: () => events.jump(first_bad),
            },
            T.firstBad,
          )
        : null,
    ),
    ...lines.map(line => h('div', { class: 'llmdebug-line' }, line)),
    findings.length ? findingList(overview, ask, events) : null,
    overview.marks.length ? markList(overview, { ask, took: events.took }) : null,
    ...notes.map(note => h('div', { class: 'llmdebug-note' }, note)),
  );
}
