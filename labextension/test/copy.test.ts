// @vitest-environment happy-dom
import { afterEach, expect, test, vi } from 'vitest';
import { copyButton, kernelCode } from '../src/widget/copy';
import * as T from '../src/widget/strings';
import { named } from './fakes';

const clipboard = (writeText?: (text: string) => Promise<void>) =>
  vi.stubGlobal('navigator', { clipboard: writeText && { writeText } });

afterEach(() => void vi.unstubAllGlobals());

test('the text is copied as it is, and that is said', async () => {
  const [write, say] = [vi.fn(() => Promise.resolve()), vi.fn()];
  clipboard(write);
  copyButton('Copy', 'x = "<b>"\n', say).click();
  await vi.waitFor(() => expect(say).toHaveBeenCalledWith(T.copied));
  expect(write).toHaveBeenCalledWith('x = "<b>"\n');
});

test('a refusal of the browser is said, and is no success', async () => {
  const say = vi.fn();
  clipboard(() => Promise.reject(new Error('denied')));
  copyButton('Copy', 'x', say).click();
  await vi.waitFor(() => expect(say.mock.calls).toEqual([[T.notCopied]]));
});

test('a page without a clipboard says so', async () => {
  const say = vi.fn();
  clipboard();
  copyButton('Copy', 'x', say).click();
  await vi.waitFor(() => expect(say.mock.calls).toEqual([[T.notCopied]]));
});

test('the code of a kernel is shown as text, can be scrolled by keys, and copied', async () => {
  const [write, say] = [vi.fn(() => Promise.resolve()), vi.fn()];
  clipboard(write);
  const root = kernelCode('if a <b> c:', say);
  const shown = root.querySelector('pre')!;
  expect([shown.textContent, shown.tabIndex, shown.childElementCount]).toEqual([
    'if a <b> c:',
    0,
    0,
  ]);
  expect(shown.getAttribute('aria-label')).toBe(T.kernelCode);
  named(root, T.copyKernel).click();
  await vi.waitFor(() => expect(write).toHaveBeenCalledWith('if a <b> c:'));
});
