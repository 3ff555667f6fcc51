/** Keys that work everywhere in the widget, except in text fields. */
import { swallow } from './dom';

/** What each key does. */
export type Actions = Record<string, () => void>;

const TYPING = 'input:not([type=checkbox]):not([type=range]), select, textarea';
const SUPPRESS = 'data-lm-suppress-shortcuts';

/** Listen for keys until the returned function is called. */
export function onKeys(root: HTMLElement, actions: Actions): () => void {
  root.addEventListener('keydown', event => {
    if (isForHost(event)) return;
    const action = (event.target as HTMLElement).matches(TYPING) ? undefined : actions[event.key];
    if (action) {
      swallow(event);
      action();
    } else if (event.key.length === 1) event.stopPropagation();
  });
  return shield(root);
}

/** True for keys that stay Jupyter's: shortcuts such as save, run cell, and leave cell. */
function isForHost(event: KeyboardEvent): boolean {
  return (
    event.ctrlKey ||
    event.metaKey ||
    event.altKey ||
    event.key === 'Escape' ||
    (event.shiftKey && event.key === 'Enter')
  );
}

/**
 * Keep Jupyter from acting on plain keys.
 *
 * Jupyter reads keys before the widget does: in command mode, `d d` and `x` delete the cell. It
 * ignores keys whose target has the attribute, so a capturing listener sets it first.
 */
function shield(root: HTMLElement): () => void {
  const before = (event: KeyboardEvent) => {
    const path = event.composedPath();
    if (path.includes(root)) (path[0] as Element).toggleAttribute(SUPPRESS, !isForHost(event));
  };
  window.addEventListener('keydown', before, true);
  return () => window.removeEventListener('keydown', before, true);
}
