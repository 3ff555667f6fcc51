/** The elements with the largest differences. */
import { button, h } from './dom';
import { figure } from './format';
import type { Ask } from './rpc';
import { SIDES } from './strings';
import * as T from './strings';
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

  /** Return the index of the worst element. `row` -1: there is no difference to show. */
  async show(row: number): Promise<number[] | undefined> {
    const asked = ++this.asked;
    const answer = row < 0 ? undefined : (await this.ask('worst', { row, n: ELEMENTS }))?.answer;
    if (asked !== this.asked) return undefined;
    this.root.hidden = !answer;
    if (!answer) return undefined;
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
        ...answer.elements.map(element => this.line(element, asked)),
      ),
    );
    return answer.elements[0]?.index;
  }

  /** `asked`: the request whose answer it is. Once another tensor is asked for, it goes nowhere. */
  private line({ index, ...values }: Element, asked: number): HTMLElement {
    const go = () => {
      if (asked === this.asked) this.choose(index);
    };
    const props = { class: 'llmdebug-link', title: T.showElement };
    return h(
      'tr',
      {},
      h('th', { scope: 'row' }, button(go, props, `[${index.join(', ')}]`)),
      ...FIGURES.map(name =>
        h('td', { title: String(values[name] ?? '') }, figure(values[name], 5)),
      ),
    );
  }
}
