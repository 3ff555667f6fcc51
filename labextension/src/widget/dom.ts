/** Builds DOM by hand. Strings become text nodes, so whatever the kernel sends stays inert. */

type Value = string | number | boolean | undefined | ((event: never) => void);
type Child = Node | string | null | undefined;

/** `on…` functions become listeners, `true` an empty attribute, `false` and `undefined` none. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Record<string, Value> = {},
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

/** Like `h`, for pictures. */
export function svg(
  tag: string,
  props: Record<string, string | number>,
  ...children: (Node | string)[]
): SVGElement {
  const el = document.createElementNS('http://www.w3.org/2000/svg', tag) as SVGElement;
  for (const [name, value] of Object.entries(props)) el.setAttribute(name, String(value));
  el.append(...children);
  return el;
}

/** Make `old` look like `fresh`, of the same tag, and touch nothing that is equal. */
export function morph<E extends HTMLElement>(old: E, fresh: E): E {
  if (old.isEqualNode(fresh)) return old;
  for (const name of old.getAttributeNames())
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const name of fresh.getAttributeNames())
    if (old.getAttribute(name) !== fresh.getAttribute(name))
      old.setAttribute(name, fresh.getAttribute(name)!);
  const [was, is] = [[...old.childNodes], [...fresh.childNodes]];
  if (was.length !== is.length || was.some((node, k) => !node.isEqualNode(is[k]!)))
    old.replaceChildren(...is);
  return old;
}

let ids = 0;

/** A document-wide id that no other view of the same widget has. */
export function uniqueId(): string {
  ids += 1;
  return `llmdebug-${Math.random().toString(36).slice(2, 8)}-${ids}`;
}

export function clamp(value: number, low: number, high: number): number {
  return Math.max(low, Math.min(high, value));
}

/** Is the keyboard in `el`? The widget may live in a shadow root. */
export function hasFocus(el: HTMLElement): boolean {
  const active = (el.getRootNode() as Document | ShadowRoot).activeElement;
  return active !== null && el.contains(active);
}

/** Jupyter must not act on a key that the widget used. */
export function swallow(event: Event): void {
  event.preventDefault();
  event.stopPropagation();
}
