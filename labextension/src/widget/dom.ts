/** Builds DOM nodes. Strings become text nodes, so markup that the kernel sends stays inert. */

type Value = string | number | boolean | undefined | ((event: never) => void);
type Props = Record<string, Value>;
type Child = Node | string | null | undefined;

/**
 * Create an element.
 *
 * A function under an `on…` name becomes a listener, `true` an empty attribute; `false` and
 * `undefined` are left out.
 */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === 'function') el.addEventListener(name.slice(2), value as EventListener);
    else if (value !== undefined && value !== false)
      el.setAttribute(name, value === true ? '' : String(value));
  }
  el.append(...children.filter(child => child !== null && child !== undefined));
  return el;
}

/** Create a button that calls `onclick`. */
export function button(onclick: () => void, props: Props, ...children: Child[]): HTMLButtonElement {
  return h('button', { class: 'llmdebug-button', type: 'button', onclick, ...props }, ...children);
}

/** Create an SVG element. */
export function svg(
  tag: string,
  props: Record<string, string | number>,
  ...children: (Node | string)[]
): SVGElement {
  const el = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(props)) el.setAttribute(name, String(value));
  el.append(...children);
  return el;
}

/** Turn `old` into a copy of `fresh`, which has the same tag. Equal parts are not touched. */
export function morph<E extends HTMLElement>(old: E, fresh: E): E {
  if (old.isEqualNode(fresh)) return old;
  for (const name of old.getAttributeNames())
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const name of fresh.getAttributeNames())
    if (old.getAttribute(name) !== fresh.getAttribute(name))
      old.setAttribute(name, fresh.getAttribute(name)!);
  const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
  if (before.length !== after.length || before.some((node, i) => !node.isEqualNode(after[i]!)))
    old.replaceChildren(...after);
  return old;
}

let ids = 0;

/** Return an id that is unique in the document, other views of the same widget included. */
export function uniqueId(): string {
  ids += 1;
  return `llmdebug-${Math.random().toString(36).slice(2, 8)}-${ids}`;
}

export function clamp(value: number, low: number, high: number): number {
  return Math.max(low, Math.min(high, value));
}

/** True if `el` contains the focused element. The widget may live in a shadow root. */
export function hasFocus(el: HTMLElement): boolean {
  const active = (el.getRootNode() as Document | ShadowRoot).activeElement;
  return active !== null && el.contains(active);
}

/** Keep Jupyter from acting on an event that the widget handled. */
export function swallow(event: Event): void {
  event.preventDefault();
  event.stopPropagation();
}
