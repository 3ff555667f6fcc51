/** Puts an explorer, with its style, into an element of the page. */
import { h } from './dom';
import css from './style.css';

/** Return the function that removes it again. */
export function mounted(el: HTMLElement, mount: (root: HTMLElement) => () => void): () => void {
  const style = h('style');
  style.textContent = css;
  const root = h('div', { class: 'llmdebug' });
  el.append(style, root);
  const dispose = mount(root);
  return () => {
    dispose();
    el.replaceChildren();
  };
}
