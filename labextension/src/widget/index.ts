import type { RenderProps } from '@anywidget/types';
import { h } from './dom';
import { Explorer, type Traits } from './explorer';
import css from './style.css';

function render({ model, el }: RenderProps<Traits>): () => void {
  const style = h('style');
  style.textContent = css;
  const root = h('div', { class: 'llmdebug' });
  el.append(style, root);
  const explorer = new Explorer(model, root);
  return () => {
    explorer.dispose();
    el.replaceChildren();
  };
}

export default { render };
