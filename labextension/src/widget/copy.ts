/** A button that copies text and reports whether that worked. */
import { button, h } from './dom';
import * as T from './strings';

export type Say = (text: string) => void;

export function copyButton(label: string, text: string, say: Say): HTMLElement {
  return button(() => void copy(text, say), {}, label);
}

async function copy(text: string, say: Say): Promise<void> {
  try {
    await navigator.clipboard.writeText(text); // undefined on insecure pages, which throws
    say(T.copied);
  } catch {
    say(T.notCopied);
  }
}

/** The code of a kernel with a button to copy it. */
export function kernelCode(code: string, say: Say): HTMLElement {
  return h(
    'div',
    { class: 'llmdebug-code' },
    copyButton(T.copyKernel, code, say),
    h('pre', { class: 'llmdebug-script', tabindex: 0, 'aria-label': T.kernelCode }, code),
  );
}
