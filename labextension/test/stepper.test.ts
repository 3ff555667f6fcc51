// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { Stepper } from '../src/widget/stepper';
import type { Step } from '../src/widget/wire';

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

function stepper(count: number) {
  const steps = Array.from({ length: count }, (_, index) => ({
    ...{ index, kind: 'decode', label: `${index} decode`, text: '', rows: 1, bad: 0 },
  })) as Step[];
  let busy = false;
  const positions: number[] = [];
  const made = new Stepper(
    steps,
    position => {
      positions.push(position);
      made.show(position);
    },
    () => !busy,
  );
  document.body.replaceChildren(made.root);
  made.show(0);
  const play = made.root.querySelector('button')!;
  const press = (key: string) =>
    made.root.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
  return { made, positions, play, press, setBusy: (value: boolean) => void (busy = value) };
}

test('playing visits every step and stops at the last one', () => {
  const { positions, play } = stepper(3);
  play.click();
  vi.advanceTimersByTime(10_000);
  expect([positions, play.getAttribute('aria-pressed')]).toEqual([[1, 2], 'false']);
});

test('playing from the last step starts at the first one', () => {
  const { made, positions, play } = stepper(3);
  made.show(2);
  play.click();
  expect(positions).toEqual([0]);
});

test('playing waits while the kernel is busy', () => {
  const { positions, play, setBusy } = stepper(3);
  setBusy(true);
  play.click();
  vi.advanceTimersByTime(10_000);
  expect(positions).toEqual([]);
  setBusy(false);
  vi.advanceTimersByTime(1000);
  expect(positions).toEqual([1]);
});

test('any other action stops the playing', () => {
  const { made, positions, play } = stepper(3);
  play.click();
  made.halt(new MouseEvent('pointerdown'));
  vi.advanceTimersByTime(10_000);
  expect(positions).toEqual([]);
});

test('arrow keys, Home and End move, and stop at the ends', () => {
  const { positions, press } = stepper(4);
  for (const key of ['ArrowLeft', 'ArrowRight', 'End', 'ArrowRight', 'Home']) press(key);
  expect(positions).toEqual([1, 3, 0]);
});

test('a single step can neither be played nor left', () => {
  const { made } = stepper(1);
  const buttons = [...made.root.querySelectorAll<HTMLButtonElement>(':scope > button')];
  expect(buttons.map(button => button.disabled)).toEqual([true, true, true]);
});
