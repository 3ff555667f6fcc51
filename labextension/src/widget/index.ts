import type { RenderProps } from '@anywidget/types';
import { explore, type Traits } from './explorer';
import { mounted } from './mounted';

function render({ model, el }: RenderProps<Traits>): () => void {
  return mounted(el, root => explore(model, root));
}

export default { render };
