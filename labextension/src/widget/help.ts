/** The list of keys. */
import { h } from './dom';
import * as T from './strings';

export class Help {
  readonly root = h('dialog', { class: 'llmdebug-help', 'aria-label': T.keysTitle });

  constructor(report: boolean) {
    const keys = report ? T.reportKeys : T.runKeys;
    this.root.append(
      h('h3', {}, T.keysTitle),
      h(
        'dl',
        {},
        ...keys.flatMap(([key, what]) => [h('dt', {}, h('kbd', {}, key)), h('dd', {}, what)]),
      ),
      h(
        'button',
        { class: 'llmdebug-button', type: 'button', onclick: () => this.root.close() },
        T.close,
      ),
    );
  }

  turn(): void {
    if (this.root.open) this.root.close();
    else this.root.show();
    if (this.root.open) this.root.querySelector('button')?.focus();
  }
}
