/** Keys that work everywhere in the widget, except in text fields. */
import { swallow } from './dom';

export interface Actions {
  record: (delta: 1 | -1) => void;
  mismatch: (delta: 1 | -1) => void;
  expect: () => void;
}

const TYPING = 'input:not([type=checkbox]):not([type=range]), select, textarea';
const SUPPRESS = 'data-lm-suppress-shortcuts';

/** Listen for keys until the returned function is called. */
export function onKeys(root: HTMLElement, actions: Actions): () => void {
  root.addEventListener('keydown', event => {
    if (isForHost(event)) return;
    const action = (event.target as HTMLElement).matches(TYPING)
      ? undefined
      : actionOf(event.key, actions);
    if (action) {
      swallow(event);
      action();
    } else if (event.key.length === 1) event.stopPropagation();
  });
  return shield(root);
}

function actionOf(key: string, { record, mismatch, expect }: Actions): (() => void) | undefined {
  const actions: Record<string, () => void> = {
    n: () => record(1),
    p: () => record(-1),
    N: () => mismatch(1),
    P: () => mismatch(-1),
    e: expect,
  };
  return actions[key];
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
