/** The elements of a tensor that differ most. */
import { h } from './dom';
import { figure } from './format';
import type { Ask } from './rpc';
import { SIDES, T } from './strings';
import type { Element } from './wire';

const ELEMENTS = 10;
const FIGURES = ['golden', 'mine', 'difference'] as const;

export class Worst {
  readonly root = h('div', { class: 'llmdebug-worst', hidden: true });
  private asked = 0;

  constructor(
    private ask: Ask,
    private choose: (index: number[]) => void,
  ) {}

  /** -1: there is nothing to compare. */
  async show(row: number): Promise<void> {
    const asked = ++this.asked;
    const answer = row < 0 ? undefined : (await this.ask('worst', { row, n: ELEMENTS }))?.answer;
    if (asked !== this.asked) return;
    this.root.hidden = !answer;
    if (!answer) return;
    this.root.replaceChildren(
      h(
        'table',
        { class: 'llmdebug-table' },
        h('caption', {}, T.worst(answer.elements.length, answer.differing)),
        h(
          'tr',
          {},
          h('th', { scope: 'col' }, T.element),
          ...FIGURES.map(name => h('th', { scope: 'col' }, SIDES[name])),
        ),
        ...answer.elements.map(element => this.line(element)),
      ),
    );
  }

  private line(element: Element): HTMLElement {
    const index = `[${element.index.join(', ')}]`;
    return h(
      'tr',
      {},
      h(
        'th',
        { scope: 'row' },
        h(
          'button',
          {
            class: 'llmdebug-link',
            type: 'button',
            title: T.showElement,
            onclick: () => this.choose(element.index),
          },
          index,
        ),
      ),
      ...FIGURES.map(name =>
        h('td', { title: String(element[name] ?? '') }, figure(element[name], 5)),
      ),
    );
  }
}
