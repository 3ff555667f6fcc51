/** A button that copies text, and says whether the browser let it. */
import { h } from './dom';
import { T } from './strings';

export type Say = (text: string) => void;

export function copyButton(label: string, text: string, say: Say): HTMLElement {
  return h(
    'button',
    { class: 'llmdebug-button', type: 'button', onclick: () => void copy(text, say) },
    label,
  );
}

async function copy(text: string, say: Say): Promise<void> {
  try {
    await navigator.clipboard.writeText(text); // absent where the page is not served securely
    say(T.copied);
  } catch {
    say(T.notCopied);
  }
}

/** The code of a kernel, and a button that copies it. */
export function kernelCode(code: string, say: Say): HTMLElement {
  return h(
    'div',
    { class: 'llmdebug-code' },
    copyButton(T.copyKernel, code, say),
    h('pre', { class: 'llmdebug-script', tabindex: 0, 'aria-label': T.kernelCode }, code),
  );
}
