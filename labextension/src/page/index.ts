/** A saved page: the explorer, with the file's data in place of a kernel. */
import type { RenderProps } from '@anywidget/types';
import { PageModel } from '../protocol/page_model';
import type { Traits } from '../widget/explorer';
import widget from '../widget/index';
import * as T from '../widget/strings';
import type { SavedPage } from '../widget/wire';
import { Saved } from './saved';

async function start(): Promise<void> {
  const el = document.querySelector<HTMLElement>('main')!;
  try {
    const page = await unpacked(document.getElementById('saved')!.textContent);
    const { position, selected, path } = page.state;
    const traits = { snapshot: page.snapshot, saved: page.state, position, selected, path };
    el.replaceChildren();
    const model = new PageModel(traits, new Saved(page)).asModel();
    widget.render({ model, el } as unknown as RenderProps<Traits>);
  } catch (error) {
    el.append(T.unpackable((error as Error).message));
  }
}

async function unpacked(text: string): Promise<SavedPage> {
  const bytes = Uint8Array.from(atob(text), char => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return (await new Response(stream).json()) as SavedPage;
}

void start();
