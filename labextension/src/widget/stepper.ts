/** The token stepper: one button per step. Only buttons in view exist in the DOM. */
import { button, clamp, h, swallow } from './dom';
import { endOf } from './format';
import * as T from './strings';
import { VirtualList } from './virtual';
import type { Step, RequestRows } from './wire';

const WIDTH = 112;
const TEXT_WIDTH = 204;
const TEXT_ROOM = 15;
const PLAY_MS = 700;

export class Stepper {
  readonly root: HTMLElement;
  private position = 0;
  private width: number;
  private list: VirtualList;
  private previous = arrow('◀', T.previousStep, () => this.go(-1));
  private next = arrow('▶', T.nextStep, () => this.go(1));
  private play = button(
    () => (this.timer ? this.stop() : this.start()),
    { 'aria-label': T.playTokens },
    T.playFace,
  );
  /** The request whose steps are shown; '' for all. */
  private request = '';
  /** The positions that are shown. */
  private shown: number[] = [];
  private requests: HTMLSelectElement;
  private timer: ReturnType<typeof setInterval> | undefined;

  /** `idle`: true if no request is pending. Playing waits until the step is shown. */
  constructor(
    private steps: Step[],
    private choose: (position: number) => void,
    private idle: () => boolean,
  ) {
    const named = steps.some(step => step.text || step.requests.length);
    this.width = named ? TEXT_WIDTH : WIDTH;
    this.requests = h('select', {
      'aria-label': T.request,
      class: 'llmdebug-button llmdebug-requests',
      onchange: () => this.pick(this.requests.value),
    });
    // the first option that a list gets is the chosen one
    this.requests.append(h('option', { value: '' }, T.allRequests));
    this.requests.append(...requestsOf(steps).map(name => h('option', { value: name }, name)));
    this.requests.hidden = this.requests.length === 1;
    this.list = new VirtualList({
      item: this.width,
      horizontal: true,
      render: i => this.button(i),
      painted: had => had && this.focus(),
    });
    this.list.root.removeAttribute('tabindex');
    this.root = h(
      'div',
      {
        class: 'llmdebug-stepper',
        role: 'toolbar',
        'aria-label': T.stepper,
        onkeydown: (event: KeyboardEvent) => this.key(event),
      },
      this.requests,
      this.play,
      this.previous,
      this.list.root,
      this.next,
    );
    this.stop();
    this.filter();
    if (steps.length === 0) this.list.root.append(h('span', { class: 'llmdebug-dim' }, T.noSteps));
  }

  /** Show the same steps with new verdicts. */
  take(steps: Step[]): void {
    this.steps = steps;
    this.filter();
  }

  show(position: number): void {
    this.position = clamp(position, 0, Math.max(0, this.steps.length - 1));
    if (!this.shown.includes(this.position) && this.steps.length) this.pick('', false);
    const at = this.shown.indexOf(this.position);
    this.previous.disabled = at <= 0;
    this.next.disabled = at >= this.shown.length - 1;
    this.play.disabled = this.shown.length < 2;
    this.list.reveal(Math.max(at, 0));
  }

  /** Show the steps of one request, the first one if the shown step has none of it. */
  private pick(request: string, go = true): void {
    this.request = this.requests.value = request;
    this.filter();
    if (!go) return;
    const first = this.shown[0] ?? 0;
    if (this.shown.includes(this.position)) this.show(this.position);
    else this.choose(first);
  }

  private filter(): void {
    this.shown = this.steps.flatMap((step, at) => (this.rowsOf(step) ? [at] : []));
    this.list.setCount(this.shown.length);
    this.list.refresh();
  }

  /** Return the chosen request's rows in a step; of all requests the first one's, or true. */
  private rowsOf(step: Step): RequestRows | boolean {
    if (!this.request) return true;
    return step.requests.find(({ name }) => name === this.request) ?? false;
  }

  /** Stop playing at any action of the user. Presses of the button itself are handled there. */
  halt(event: Event): void {
    const presses = !(event instanceof KeyboardEvent) || event.key === ' ' || event.key === 'Enter';
    if (!presses || !event.composedPath().includes(this.play)) this.stop();
  }

  /** Play from the selected step, from the first one if the last is selected. */
  private start(): void {
    if (this.next.disabled) this.choose(this.shown[0] ?? 0);
    this.timer = setInterval(() => this.advance(), PLAY_MS);
    this.tell(true);
  }

  private stop(): void {
    clearInterval(this.timer);
    this.timer = undefined;
    this.tell(false);
  }

  private advance(): void {
    if (!this.idle()) return;
    this.go(1);
    if (this.next.disabled) this.stop();
  }

  private tell(playing: boolean): void {
    this.root.classList.toggle('llmdebug-playing', playing);
    this.play.setAttribute('aria-pressed', String(playing));
    this.play.title = playing ? T.pause : T.play;
  }

  dispose(): void {
    this.stop();
    this.list.dispose();
  }

  private button(at: number): HTMLElement {
    const i = this.shown[at]!;
    const { label, kind, text, rows, bad, requests } = this.steps[i]!;
    const current = i === this.position;
    const own = requests.filter(({ name }) => !this.request || name === this.request);
    const places = own.map(one => T.rowsOfRequest(one));
    const names = own.map(({ name }) => name).join(', ');
    const several = names.length <= TEXT_ROOM ? names : T.requests(own.length);
    const seen = own.length === 1 ? T.positions(own[0]!) : several;
    return h(
      'button',
      {
        class: `llmdebug-step${kind === 'warmup' ? ' llmdebug-warmup' : ''}`,
        type: 'button',
        style: `width:${this.width - 4}px`,
        tabindex: current ? 0 : -1,
        'aria-current': current ? 'step' : undefined,
        'data-index': i,
        title: [`${label}: ${T.stepTitle(kind, rows, bad)}`, text, ...places]
          .filter(Boolean)
          .join('\n'),
        onclick: () => this.choose(i),
      },
      h('span', { class: 'llmdebug-step-label' }, label),
      text || seen
        ? h(
            'span',
            { class: 'llmdebug-step-text' },
            seen ? endOf(seen, TEXT_ROOM) : T.fed(endOf(text, TEXT_ROOM)),
          )
        : null,
      bad ? h('span', { class: 'llmdebug-badge' }, String(bad)) : null,
    );
  }

  private go(delta: number): void {
    const at = this.shown.indexOf(this.position);
    const position = this.shown[clamp(at + delta, 0, this.shown.length - 1)];
    if (position !== undefined && position !== this.position) this.choose(position);
  }

  private key(event: KeyboardEvent): void {
    const to: Record<string, number> = {
      ArrowLeft: -1,
      ArrowRight: 1,
      Home: -this.steps.length,
      End: this.steps.length,
    };
    const delta = to[event.key];
    if (delta === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    swallow(event);
    this.go(delta);
    this.focus();
  }

  /** Focus the selected step: a repaint replaces the button that had the focus. */
  private focus(): void {
    this.list.root.querySelector<HTMLElement>('[aria-current]')?.focus({ preventScroll: true });
  }
}

function arrow(face: string, label: string, go: () => void): HTMLButtonElement {
  return button(go, { 'aria-label': label, title: label }, face);
}

/** Return the names of all requests, in the order in which they came. */
function requestsOf(steps: Step[]): string[] {
  return [...new Set(steps.flatMap(step => step.requests.map(({ name }) => name)))];
}
