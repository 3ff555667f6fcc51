// @vitest-environment happy-dom
import { expect, test, vi } from 'vitest';
import { OPEN_LINE } from '../src/widget/answer';
import { Halt } from '../src/widget/halt';
import type { Ask } from '../src/widget/rpc';
import type { HaltView } from '../src/widget/wire';

const halt: HaltView = {
  ended: false,
  head: 'Halted in',
  place: 'port.py:30',
  where: 'layers.1.mlp (<b>MLP</b>), step 0',
  why: 'output 0 is 0.2 off golden',
  tensors: 'output 0  float32 [1, 7, 64]',
  rest: '',
  file: 'port.py',
  line: 30,
  commands: [
    { name: 'op', effect: 'to the next call', can: true },
    { name: 'replace', effect: "put golden's values in", can: false },
  ],
  listing: {
    golden_file: '',
    golden_function: '',
    mine_file: 'port.py',
    mine_function: 'MLP.forward',
    lines: [],
    at: -1,
    note: '',
  },
};

async function shown(given: Partial<HaltView> = {}, focus = '') {
  const ask = vi.fn((op: string) =>
    Promise.resolve(
      op === 'halt'
        ? { answer: { ...halt, ...given }, buffers: [] }
        : op === 'step'
          ? { answer: { halt: 2 }, buffers: [] }
          : undefined,
    ),
  );
  const events = { show: vi.fn(), updated: vi.fn(), say: vi.fn() };
  const made = new Halt(ask as unknown as Ask, events, focus);
  document.body.replaceChildren(made.root);
  await vi.waitFor(() => expect(events.show).toHaveBeenCalled());
  const named = (name: string) =>
    [...made.root.querySelectorAll('button')].find(each => each.textContent === name)!;
  return { made, ask, events, named };
}

test('the head says where, the lines why and with which tensors; names are text', async () => {
  const { made } = await shown();
  expect(made.root.querySelector('h2')!.textContent).toBe(
    '‖ Halted in port.py:30 · layers.1.mlp (<b>MLP</b>), step 0',
  );
  expect(made.root.querySelector('h2 b')).toBeNull();
  const terms = [...made.root.querySelectorAll('dt')].map(each => each.textContent);
  expect(terms).toEqual(['why', 'outputs']);
});

test('after values were put in, a line says what agrees', async () => {
  const { made } = await shown({ ended: true, rest: 'the rest agrees' });
  expect(made.root.querySelector('h2')!.textContent).toContain('■');
  expect(made.root.querySelector('dl')!.textContent).toContain('restthe rest agrees');
});

test('a button lets the program go on; what cannot be done is disabled', async () => {
  const { ask, events, named } = await shown();
  expect(named('replace').disabled).toBe(true);
  named('op').click();
  expect(named('op').disabled).toBe(true);
  await vi.waitFor(() => expect(events.updated).toHaveBeenCalled());
  expect(ask).toHaveBeenCalledWith('step', { command: 'op' });
  expect(events.updated.mock.calls[0]![0]).toEqual({ halt: 2 });
  expect(named('replace').disabled).toBe(true);
});

test('the button that was pressed has the focus at the next halt', async () => {
  const { made, named } = await shown({}, 'op');
  expect(document.activeElement).toBe(named('op'));
  expect(made.focused).toBe('op');
});

test('the line is opened by whoever listens', async () => {
  const { named } = await shown();
  const opened = vi.fn((event: Event) => event.preventDefault());
  document.addEventListener(OPEN_LINE, opened, { once: true });
  named('Open line').click();
  expect((opened.mock.calls[0]![0] as CustomEvent).detail).toMatchObject({
    file: 'port.py',
    line: 30,
  });
});
