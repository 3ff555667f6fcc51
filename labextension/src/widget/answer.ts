/**
 * The answer of a comparison: which line, what, why, what to do; several findings are chips.
 *
 * Without a finding it says what was held against what, and how much of it agrees.
 */
import { copyButton, kernelCode, type Say } from './copy';
import { button, clamp, h, swallow, uniqueId } from './dom';
import { markList, MarkForm, unmarkButton, type Marking } from './expected';
import type { Ask } from './rpc';
import { VERDICTS } from './strings';
import * as T from './strings';
import type { FindingDetail, FindingView, Overview } from './wire';

export interface AnswerEvents extends Pick<Marking, 'updated'> {
  /** Show the code of a finding. */
  show: (at: number, detail: FindingDetail | null) => void;
  /** Show the tensor of a finding, which the user chose. */
  chosen: (finding: FindingView) => void;
  say: Say;
}

/** Opens a line in JupyterLab: its extension listens, and prevents the default if it can. */
export const OPEN_LINE = 'llmdebug:open-line';

type Drawer = 'repro' | 'more';

export class Answer {
  readonly root = h('div', { class: 'llmdebug-answer' });
  /** The finding that is shown; -1 if there is none. */
  at = 0;
  private uid = uniqueId();
  private drawer: Drawer | '' = '';
  private details = new Map<number, FindingDetail>();
  /** What the kernel computes now: drawing replaces its button. */
  private running = new Set<string>();
  private asked = 0;

  constructor(
    private overview: Overview,
    private ask: Ask,
    private events: AnswerEvents,
  ) {
    this.take(overview);
  }

  /** Show new verdicts. */
  take(overview: Overview): void {
    this.overview = overview;
    this.details.clear();
    this.at = clamp(this.at, 0, overview.findings.length - 1);
    if (overview.findings.length === 0) this.at = -1;
    void this.load();
  }

  /** Go to the next finding, and from the last one to the first. */
  next(): void {
    const { length } = this.overview.findings;
    if (length === 0) return this.events.say(T.noFindings);
    this.go((this.at + 1) % length);
  }

  /** Open the form that marks the finding as expected. */
  expect(): void {
    this.drawer = 'more';
    this.draw();
    this.root.querySelector<HTMLElement>('[data-mark^=finding]')?.click();
  }

  private get finding(): FindingView | undefined {
    return this.overview.findings[this.at];
  }

  private go(at: number): void {
    this.at = at;
    void this.load();
    if (this.finding) this.events.chosen(this.finding);
  }

  /** Draw at once, and again with what only the details have. */
  private async load(): Promise<void> {
    const asked = ++this.asked;
    this.draw();
    if (this.at < 0) return this.events.show(-1, null);
    if (!this.details.has(this.at)) {
      const reply = await this.ask('finding', { finding: this.at });
      if (asked !== this.asked) return;
      if (reply) this.details.set(this.at, reply.answer);
      this.draw();
    }
    this.events.show(this.at, this.details.get(this.at) ?? null);
  }

  private draw(): void {
    const { overview, finding } = this;
    const focused = this.focused();
    const shown = finding?.expected ? 'expected' : overview.verdict;
    this.root.dataset.verdict = shown ?? '';
    this.root.replaceChildren(
      h(
        'div',
        { class: 'llmdebug-answer-head' },
        this.title(),
        h('div', { class: 'llmdebug-actions' }, ...this.actions()),
      ),
      ...(finding ? this.reasons(finding) : this.figures()),
      this.chips(),
      this.drawer ? this.opened(this.drawer) : '',
    );
    if (focused) this.root.querySelector<HTMLElement>(`[data-key='${focused}']`)?.focus();
  }

  /** Return the key of the button that has the focus: drawing replaces it. */
  private focused(): string | undefined {
    const { activeElement } = this.root.getRootNode() as Document | ShadowRoot;
    const key = this.root.contains(activeElement) && activeElement?.getAttribute('data-key');
    if (!key) return undefined;
    return key === 'chip' ? 'chip-now' : key;
  }

  private title(): HTMLElement {
    const { overview, finding } = this;
    const { mark, text } = VERDICTS[finding?.expected ? 'expected' : (overview.verdict ?? 'match')];
    const verdict = h(
      'span',
      { class: `llmdebug-verdict llmdebug-${finding?.expected ? 'expected' : overview.verdict}` },
      mark,
      h('span', { class: finding ? 'llmdebug-spoken' : '' }, ` ${text}`),
    );
    if (!finding) {
      const caution =
        overview.caution && h('span', { class: 'llmdebug-caution' }, overview.caution);
      return h('h2', {}, verdict, ' ', caution || null);
    }
    const { head, place, where, expected } = finding;
    return h(
      'h2',
      {},
      verdict,
      ` ${expected ? `${T.expectedHead(expected)} · ` : ''}${head} `,
      h('code', {}, place),
      where.startsWith(place) ? where.slice(place.length) : ` · ${where}`,
    );
  }

  private actions(): HTMLElement[] {
    const { finding, overview } = this;
    const more = this.turner('more', T.moreFace, T.moreTitle);
    const back = overview.inside ? [this.runner('inside', -1, T.back, T.backTitle)] : [];
    if (!finding) return [...back, more];
    const isModule = !finding.path.includes('/') && !overview.inside;
    return [
      ...this.opener(finding),
      ...back,
      this.runner('prove', this.at, T.prove, T.proveTitle),
      ...(isModule ? [this.runner('inside', this.at, T.inside, T.insideTitle)] : []),
      this.turner('repro', T.repro, T.reproTitle),
      more,
    ];
  }

  private opener(finding: FindingView): HTMLElement[] {
    const { file, line } = lineOf(finding, this.details.get(this.at));
    if (!file) return [];
    const open = () => openLine(this.root, file, line, this.events.say);
    return [
      button(
        open,
        { class: 'llmdebug-button llmdebug-primary', 'data-key': 'open', title: T.openTitle },
        T.open,
      ),
    ];
  }

  /** A button for what the kernel computes; it may take as long as the model. */
  private runner(op: 'prove' | 'inside', at: number, face: string, title: string): HTMLElement {
    const key = `${op} ${at}`;
    const run = async () => {
      this.running.add(key);
      it.disabled = true;
      this.events.say(T.running(face));
      const reply = await this.ask(op, { finding: at });
      this.running.delete(key);
      this.draw();
      if (!reply) return;
      this.events.updated(reply.answer, reply.answer.findings[at]?.proof ?? '');
    };
    const it = button(
      () => void run(),
      { class: 'llmdebug-button llmdebug-runner', 'data-key': op, title },
      face,
    );
    it.disabled = this.running.has(key);
    return it;
  }

  private turner(drawer: Drawer, face: string, title: string): HTMLElement {
    const turn = () => {
      this.drawer = this.drawer === drawer ? '' : drawer;
      this.draw();
    };
    const open = this.drawer === drawer;
    const controls = open ? this.uid : undefined;
    const props = { 'aria-expanded': String(open), 'aria-controls': controls, 'data-key': drawer };
    const name = face === T.moreFace ? title : undefined;
    return button(turn, { ...props, title, 'aria-label': name }, face);
  }

  /** What, why, and what to do; then what a proof said. */
  private reasons({ what, which, why, do: advice, proof }: FindingView): HTMLElement[] {
    const lines: [string, string][] = [
      [T.what, what],
      [T.which, which],
      [T.why, why],
      [T.advice, advice],
      [T.proof, proof],
    ];
    return [
      h(
        'dl',
        { class: 'llmdebug-reasons' },
        ...lines
          .filter(([, text]) => text)
          .flatMap(([name, text]) => [h('dt', {}, name), h('dd', { title: text }, text)]),
      ),
    ];
  }

  private figures(): HTMLElement[] {
    return [this.overview.summary, ...this.overview.lines.slice(1, 2)]
      .filter(Boolean)
      .map(line => h('div', { class: 'llmdebug-line' }, line));
  }

  private chips(): HTMLElement {
    const { findings } = this.overview;
    const group = h('div', {
      class: 'llmdebug-chips',
      role: 'radiogroup',
      'aria-label': T.findings(findings.length),
      hidden: findings.length < 2,
      onkeydown: (event: KeyboardEvent) => this.press(event),
    });
    if (findings.length > 1)
      group.append(
        ...findings.map((finding, at) =>
          button(
            () => this.choose(at),
            {
              class: `llmdebug-finding${finding.expected ? ' llmdebug-known' : ''}`,
              role: 'radio',
              'data-key': at === this.at ? 'chip-now' : 'chip',
              'aria-checked': String(at === this.at),
              tabindex: at === this.at ? 0 : -1,
              title: `${finding.where}: ${finding.cause}`,
            },
            `${finding.expected ? '☑' : '✗'} ${finding.place}`,
          ),
        ),
      );
    return group;
  }

  private choose(at: number): void {
    this.go(at);
    this.root.querySelector<HTMLElement>('[role=radio][tabindex="0"]')?.focus();
  }

  private press(event: KeyboardEvent): void {
    const last = this.overview.findings.length - 1;
    const to: Record<string, number> = {
      ArrowLeft: this.at - 1,
      ArrowRight: this.at + 1,
      Home: 0,
      End: last,
    };
    const at = to[event.key];
    if (at === undefined) return;
    swallow(event);
    this.choose(clamp(at, 0, last));
  }

  private opened(drawer: Drawer): HTMLElement {
    const parts = drawer === 'repro' ? this.script() : this.about();
    return h('div', { class: 'llmdebug-answer-drawer', id: this.uid }, ...parts);
  }

  private script(): HTMLElement[] {
    const detail = this.details.get(this.at);
    if (!detail) return [];
    const { script, why, save } = detail;
    if (!script) return [h('div', { class: 'llmdebug-why' }, T.noScript(why))];
    const { say } = this.events;
    return [
      h(
        'div',
        { class: 'llmdebug-code' },
        copyButton(T.copyScript, script, say),
        h('code', {}, save),
      ),
      h('pre', { class: 'llmdebug-script', tabindex: 0, 'aria-label': T.script }, script),
    ];
  }

  /** What the bar has no room for: the mark, the figures, the limits of the result. */
  private about(): HTMLElement[] {
    const { overview, finding } = this;
    const marking = { ask: this.ask, updated: this.events.updated };
    const detail = this.details.get(this.at);
    const key = `finding-${this.at}`;
    const parts: (HTMLElement | null)[] = [
      finding
        ? finding.mark >= 0
          ? unmarkButton(overview, finding.mark, key, marking)
          : new MarkForm({ finding: this.at }, key, marking).root
        : null,
      detail?.kernel ? h('div', {}, `${T.computedBy} `, h('code', {}, detail.kernel)) : null,
      detail?.code ? kernelCode(detail.code, this.events.say) : null,
      finding ? h('div', { class: 'llmdebug-line' }, overview.summary) : null,
      ...overview.lines.map(line => h('div', { class: 'llmdebug-line' }, line)),
      overview.marks.length ? markList(overview, marking) : null,
      ...overview.notes.map(note => h('div', { class: 'llmdebug-note' }, note)),
    ];
    return parts.filter(part => part !== null);
  }
}

/** Return the line to open: that of the code which is shown, if there is any. */
export function lineOf(
  { file, line }: Pick<FindingView, 'file' | 'line'>,
  detail?: Pick<FindingDetail, 'listing'>,
) {
  const listing = detail?.listing;
  const shown = listing?.lines[listing.at]?.mine_line;
  return listing && shown ? { file: listing.mine_file, line: shown } : { file, line };
}

/** Ask JupyterLab to open a line; where nobody can, copy its place. */
export function openLine(from: HTMLElement, file: string, line: number, say: Say): void {
  const event = new CustomEvent(OPEN_LINE, {
    bubbles: true,
    composed: true,
    cancelable: true,
    detail: { file, line, say },
  });
  if (!from.dispatchEvent(event)) return;
  const place = `${file}:${line}`;
  navigator.clipboard?.writeText(place).then(
    () => say(T.placeCopied(place)),
    () => say(place),
  );
  if (!navigator.clipboard) say(place);
}
