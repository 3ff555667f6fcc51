/** The token stepper: one button per step. Only buttons in view exist in the DOM. */
import { button, clamp, h, swallow } from './dom';
import { endOf } from './format';
import * as T from './strings';
import { VirtualList } from './virtual';
import type { Step } from './wire';

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
  private timer: ReturnType<typeof setInterval> | undefined;

  /** `idle`: true if no request is pending. Playing waits until the step is shown. */
  constructor(
    private steps: Step[],
    private choose: (position: number) => void,
    private idle: () => boolean,
  ) {
    this.width = steps.some(step => step.text) ? TEXT_WIDTH : WIDTH;
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
      this.play,
      this.previous,
      this.list.root,
      this.next,
    );
    this.stop();
    this.list.setCount(steps.length);
    if (steps.length === 0) this.list.root.append(h('span', { class: 'llmdebug-dim' }, T.noSteps));
  }

  /** Show the same steps with new verdicts. */
  take(steps: Step[]): void {
    this.steps = steps;
    this.list.refresh();
  }

  show(position: number): void {
    this.position = clamp(position, 0, Math.max(0, this.steps.length - 1));
    this.previous.disabled = this.position === 0;
    this.next.disabled = this.position >= this.steps.length - 1;
    this.play.disabled = this.steps.length < 2;
    this.list.reveal(this.position);
  }

  /** Stop playing at any action of the user. Presses of the button itself are handled there. */
  halt(event: Event): void {
    const presses = !(event instanceof KeyboardEvent) || event.key === ' ' || event.key === 'Enter';
    if (!presses || !event.composedPath().includes(this.play)) this.stop();
  }

  /** Play from the selected step, from the first one if the last is selected. */
  private start(): void {
    if (this.next.disabled) this.choose(0);
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

  private button(i: number): HTMLElement {
    const { label, kind, text, rows, bad } = this.steps[i]!;
    const current = i === this.position;
    return h(
      'button',
      {
        class: `llmdebug-step${kind === 'warmup' ? ' llmdebug-warmup' : ''}`,
        type: 'button',
        style: `width:${this.width - 4}px`,
        tabindex: current ? 0 : -1,
        'aria-current': current ? 'step' : undefined,
        'data-index': i,
        title: [`${label}: ${T.stepTitle(kind, rows, bad)}`, text].filter(Boolean).join('\n'),
        onclick: () => this.choose(i),
      },
      h('span', { class: 'llmdebug-step-label' }, label),
      text ? h('span', { class: 'llmdebug-step-text' }, T.fed(endOf(text, TEXT_ROOM))) : null,
      bad ? h('span', { class: 'llmdebug-badge' }, String(bad)) : null,
    );
  }

  private go(delta: number): void {
    const position = clamp(this.position + delta, 0, this.steps.length - 1);
    if (position !== this.position) this.choose(position);
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
