/** The lines of golden and of mine that make a call, side by side, and the lines around them. */
import { h } from './dom';
import { figure } from './format';
import { LINES, SIDES } from './strings';
import * as T from './strings';
import type { FindingDetail, LinePairView, SourceView } from './wire';

export function line(...parts: (Node | string)[]): HTMLElement {
  return h('div', { class: 'llmdebug-source' }, ...parts);
}

/** The relation of the values, both sources, advice and lines; what is unknown is left out. */
export function sourceViews({ relation, advice, sources, pairs }: FindingDetail): HTMLElement[] {
  const found: HTMLElement[] = [];
  if (relation) found.push(h('p', { class: 'llmdebug-relation' }, relation));
  if (sources.length) found.push(h('div', { class: 'llmdebug-sources' }, ...sources.map(side)));
  if (advice) found.push(h('p', {}, advice));
  if (pairs.length) found.push(lineTable(pairs));
  return found;
}

function side({ which, place, call, code, frames }: SourceView): HTMLElement {
  const name = SIDES[which];
  return h(
    'section',
    { 'aria-label': name },
    h('b', {}, name),
    call ? h('code', {}, call) : null,
    line(place),
    code ? h('pre', { tabindex: 0, 'aria-label': T.codeOf(name) }, code) : null,
    ...frames.map(frame => line(`${T.calledAt} ${frame}`)),
  );
}

function lineTable(pairs: LinePairView[]): HTMLElement {
  const heads = [T.lineState, SIDES.golden, SIDES.mine, T.lineError];
  const rows = pairs.map(({ state, golden, mine, error }) =>
    h(
      'tr',
      { class: `llmdebug-line-${state}` },
      h('td', {}, LINES[state]),
      h('td', {}, h('code', {}, golden)),
      h('td', {}, h('code', {}, mine)),
      h('td', {}, figure(error)),
    ),
  );
  return h(
    'details',
    { class: 'llmdebug-lines' },
    h('summary', {}, T.lineByLine),
    h(
      'table',
      {},
      h('thead', {}, h('tr', {}, ...heads.map(text => h('th', { scope: 'col' }, text)))),
      h('tbody', {}, ...rows),
    ),
  );
}
