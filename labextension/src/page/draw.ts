/** Draws an explorer from packed data, with that data in place of a kernel. */
import type { RenderProps } from '@anywidget/types';
import { PageModel } from '../protocol/page_model';
import type { Traits } from '../widget/explorer';
import widget from '../widget/index';
import type { SavedPage } from '../widget/wire';
import { Saved } from './saved';

/** Characters of unpacked data: more than any page that we write. */
const LARGEST = 500_000_000;

/** Return the function that removes it again. `text`: base64 of gzipped JSON. */
export async function drawSaved(el: HTMLElement, text: string): Promise<() => void> {
  const page = await unpacked(text);
  const { position, selected, path } = page.state;
  const traits = { snapshot: page.snapshot, saved: page.state, position, selected, path };
  el.replaceChildren();
  const model = new PageModel(traits, new Saved(page)).asModel();
  return widget.render({ model, el } as unknown as RenderProps<Traits>);
}

async function unpacked(text: string): Promise<SavedPage> {
  const bytes = Uint8Array.from(atob(text), char => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  const parts: string[] = [];
  let length = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return JSON.parse(parts.join('')) as SavedPage;
    length += value.length;
    if (length > LARGEST) throw new Error('too large');
    parts.push(value);
  }
}
