// @vitest-environment happy-dom
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { Stepper } from '../src/widget/stepper';
import type { Step } from '../src/widget/wire';

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

function stepper(count: number) {
  const steps = Array.from({ length: count }, (_, index) => ({
    ...{ index, kind: 'decode', label: `${index} decode`, text: '', rows: 1, bad: 0, requests: [] },
  })) as unknown as Step[];
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

/** Three steps of an engine: a alone, a and b, b alone. */
function engine(a = 'a', b = 'b') {
  const of = (name: string, position: number, row: number, count = 1) => ({
    ...{ name, position, last_position: position + count - 1, row, last_row: row + count - 1 },
  });
  const requests = [[of(a, 0, 0, 3)], [of(b, 0, 0, 2), of(a, 3, 2)], [of(b, 2, 0)]];
  const steps = requests.map((each, index) => ({
    ...{ index, kind: 'engine', label: `${index} engine`, text: '', rows: 1, bad: 0 },
    requests: each,
  })) as unknown as Step[];
  const positions: number[] = [];
  const made = new Stepper(
    steps,
    position => {
      positions.push(position);
      made.show(position);
    },
    () => true,
  );
  document.body.replaceChildren(made.root);
  made.show(0);
  const select = made.root.querySelector('select')!;
  const pick = (name: string) => {
    select.value = name;
    select.dispatchEvent(new Event('change'));
  };
  const labels = () =>
    [...made.root.querySelectorAll('.llmdebug-step')].map(one => one.getAttribute('title'));
  return { made, select, pick, positions, labels };
}

test('a run of no engine has no requests to choose from', () => {
  expect(stepper(3).made.root.querySelector('select')!.hidden).toBe(true);
});

test('the list says that all requests are shown, and a step of several names them', () => {
  const texts = (made: Stepper) =>
    [...made.root.querySelectorAll('.llmdebug-step-text')].map(one => one.textContent);
  const { select, made } = engine();
  expect([select.value, select.selectedOptions[0]!.textContent]).toEqual(['', 'all requests']);
  expect(texts(made)).toEqual(['at 0–2', 'b, a', 'at 2']);
  const long = engine('0-bd78968a', '1-b88e7449');
  expect(texts(long.made)[1]).toBe('2 requests'); // no name is cut
});

test('the steps of one request are shown alone, with its positions and rows', () => {
  const { select, pick, positions, labels, made } = engine();
  expect([...select.options].map(one => one.value)).toEqual(['', 'a', 'b']);
  expect(select.hidden).toBe(false);
  pick('b');
  expect(positions).toEqual([1]); // the first one with rows of b
  expect(labels()).toEqual([
    '1 engine: engine, 1 record\nrequest b: positions 0–1, rows 0–1',
    '2 engine: engine, 1 record\nrequest b: positions 2, rows 0',
  ]);
  made.root.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true }));
  made.root.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true }));
  expect(positions).toEqual([1, 2]);
  made.root.dispatchEvent(new KeyboardEvent('keydown', { key: 'Home', bubbles: true }));
  expect(positions).toEqual([1, 2, 1]);
});

test('a step that has none of the chosen request shows all requests again', () => {
  const { select, pick, made, labels } = engine();
  pick('b');
  made.show(0);
  expect([select.value, labels().length]).toEqual(['', 3]);
  pick('a');
  expect(labels().length).toBe(2);
});

test('playing goes through the steps of the chosen request', () => {
  const { pick, positions, made } = engine();
  pick('b');
  made.root.querySelector('button')!.click();
  vi.advanceTimersByTime(10_000);
  expect(positions).toEqual([1, 2]);
});
