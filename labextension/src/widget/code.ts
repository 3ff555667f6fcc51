/** Golden's code beside mine's: each line with how its result compares. */
import { lineOf, openLine } from './answer';
import type { Say } from './copy';
import { button, h } from './dom';
import { figure } from './format';
import { LINES } from './strings';
import * as T from './strings';
import type { CodeLine, CodeView, FindingDetail, FindingView, HaltView, SourceView } from './wire';

/** Code to show. `line`: of mine, to open. */
export interface Shown {
  isComparison: boolean;
  line: number;
  listing: CodeView;
  sources: SourceView[];
  kernel: string;
}

/** Return the code of a finding; null if it is not known (yet). */
export function codeOf(finding: FindingView | undefined, detail: FindingDetail | null) {
  if (!finding || !detail) return null;
  const { listing, sources, kernel } = detail;
  const { line } = lineOf(finding, detail);
  return { isComparison: true, line, listing, sources, kernel };
}

/** Return the function that a program is halted in. */
export function codeAt({ line, listing }: HaltView): Shown {
  return { isComparison: false, line, listing, sources: [], kernel: '' };
}

export class Code {
  readonly root = h('section', {
    class: 'llmdebug-listing',
    'aria-label': T.code,
    tabindex: 0,
    hidden: true,
  });
  private shown = '';

  constructor(private say: Say) {}

  /** Show the code of a finding or a halt. null: it is not known (yet). */
  show(code: Shown | null): void {
    const key = JSON.stringify(code);
    if (key === this.shown) return;
    this.shown = key;
    this.root.hidden = !code;
    if (!code) return;
    const { listing } = code;
    if (listing.lines.length === 0) return this.root.replaceChildren(...this.alone(code));
    this.root.classList.toggle('llmdebug-one-side', !code.isComparison);
    const lines = listing.lines.map((line, i) => this.line(line, i === listing.at));
    this.root.replaceChildren(
      this.heads(listing, code.line),
      h('table', { class: 'llmdebug-lines' }, h('tbody', {}, ...lines)),
      ...(listing.note ? [h('p', { class: 'llmdebug-note' }, listing.note)] : []),
    );
    const guilty = this.root.querySelector<HTMLElement>('[data-guilty]');
    if (guilty) this.root.scrollTop = guilty.offsetTop - this.root.clientHeight / 2;
  }

  focus(): void {
    this.root.focus();
  }

  private heads(listing: CodeView, line: number): HTMLElement {
    const { golden_file, golden_function, mine_file, mine_function } = listing;
    return h(
      'div',
      { class: 'llmdebug-listing-heads' },
      h('div', {}, h('b', {}, T.golden), ' ', this.place(golden_file, golden_function, 0)),
      h('div', {}, h('b', {}, T.mine), ' ', this.place(mine_file, mine_function, line)),
    );
  }

  private place(file: string, name: string, line: number): HTMLElement {
    if (!file) return h('span', { class: 'llmdebug-dim' }, T.noFile);
    const short = file.split(/[\\/]/).at(-1)!;
    const props = { class: 'llmdebug-link', title: `${file}\n${name}` };
    if (!line) return h('span', { title: props.title }, short);
    return button(() => openLine(this.root, file, line, this.say), props, `${short} ↗`);
  }

  private line(line: CodeLine, guilty: boolean): HTMLElement {
    const { golden_line, golden, mine_line, mine, state, error } = line;
    const exact = state === 'equal' && (error === 0 || error === null);
    const figures = error === null || exact ? '' : figure(error, 3);
    const mark = state ? T.lineMarks[state] : '';
    return h(
      'tr',
      {
        class: state ? `llmdebug-line-${state}` : undefined,
        'data-guilty': guilty,
        'aria-label': guilty ? (state === 'halted' ? LINES.halted : T.guiltyLine) : undefined,
      },
      h('td', { class: 'llmdebug-line-number' }, golden_line ? String(golden_line) : ''),
      h('td', {}, h('code', {}, golden)),
      h('td', { class: 'llmdebug-line-number' }, mine_line ? String(mine_line) : ''),
      h('td', {}, h('code', {}, mine)),
      h(
        'td',
        { class: 'llmdebug-line-state', title: state ? LINES[state] : undefined },
        [figures, mark].filter(Boolean).join(' '),
      ),
    );
  }

  /** Without functions: the calls of both sides, and their lines where they are known. */
  private alone({ sources, listing, kernel }: Shown): HTMLElement[] {
    const views = sources.map(source => this.source(source));
    const why = listing.note || (views.length ? '' : T.noCode);
    return [
      ...views,
      ...(kernel ? [h('div', {}, `${T.computedBy} `, h('code', {}, kernel))] : []),
      ...(why ? [h('p', { class: 'llmdebug-note' }, why)] : []),
    ];
  }

  private source({ which, place, call, code, frames }: SourceView): HTMLElement {
    return h(
      'div',
      { class: 'llmdebug-source' },
      h('b', {}, which),
      ' ',
      call ? h('code', {}, call) : null,
      h('div', { class: 'llmdebug-dim' }, place),
      code ? h('pre', {}, code) : null,
      ...frames.map(frame => h('div', { class: 'llmdebug-dim' }, `${T.calledAt} ${frame}`)),
    );
  }
}
