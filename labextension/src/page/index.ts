/** A saved page: the explorer, with the file's data in place of a kernel. */
import * as T from '../widget/strings';
import { drawSaved } from './draw';

async function start(): Promise<void> {
  const el = document.querySelector<HTMLElement>('main')!;
  try {
    await drawSaved(el, document.getElementById('saved')!.textContent);
  } catch (error) {
    el.append(T.unpackable((error as Error).message));
  }
}

void start();
