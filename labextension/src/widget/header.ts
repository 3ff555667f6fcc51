/** The title and the figures of a run. */
import { h } from './dom';
import { VERDICTS } from './strings';
import type { Overview, Verdict } from './wire';

export function verdictBadge(verdict: Verdict): HTMLElement {
  const { mark, text } = VERDICTS[verdict];
  return h('span', { class: `llmdebug-verdict llmdebug-${verdict}` }, `${mark} ${text}`);
}

export function header({ title, lines, notes }: Overview): HTMLElement {
  return h(
    'div',
    { class: 'llmdebug-header' },
    h('div', { class: 'llmdebug-title' }, h('h2', {}, title)),
    ...lines.map(line => h('div', { class: 'llmdebug-line' }, line)),
    ...notes.map(note => h('div', { class: 'llmdebug-note' }, note)),
  );
}
