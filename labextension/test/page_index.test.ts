// @vitest-environment happy-dom
import { expect, test, vi } from 'vitest';
import { unpackable } from '../src/widget/strings';

const drawn = vi.hoisted(() => ({ saved: vi.fn() }));
vi.mock('../src/page/draw', () => ({ drawSaved: drawn.saved }));

async function opened() {
  document.body.innerHTML = '<main></main><script id="saved" type="text/plain">packed</script>';
  vi.resetModules();
  await import('../src/page/index');
  await vi.waitFor(() => expect(drawn.saved).toHaveBeenCalled());
  return document.querySelector('main')!;
}

test('the explorer is drawn from the data of the page', async () => {
  drawn.saved.mockResolvedValue(() => undefined);
  const main = await opened();
  expect(drawn.saved.mock.calls).toEqual([[main, 'packed']]);
  expect(main.textContent).toBe('');
});

test('a page that cannot be read says why, as text', async () => {
  drawn.saved.mockRejectedValue(new Error('<b>broken</b>'));
  const main = await opened();
  await vi.waitFor(() => expect(main.textContent).toBe(unpackable('<b>broken</b>')));
  expect(main.querySelector('b')).toBeNull();
});
