/** The last line: walking through records, the drawer, messages, saving, and the list of keys. */
import { button, h, uniqueId } from './dom';
import type { Status } from './status';
import * as T from './strings';
import type { ExportRequest } from './wire';

export interface FootEvents {
  walk: (delta: 1 | -1, mismatch: boolean) => void;
  /** Not there: a saved page can't be saved again. */
  save?: (kind: ExportRequest['kind']) => void;
  help: () => void;
  /** The drawer was opened. */
  opened: () => void;
  popOut: () => void;
}

export class Foot {
  readonly root: HTMLElement;
  private uid = uniqueId();
  private drawer = h('div', { class: 'llmdebug-drawer', id: this.uid, hidden: true });
  private toggle = button(
    () => this.turn(),
    { 'aria-expanded': 'false', 'aria-controls': this.uid, class: 'llmdebug-button llmdebug-open' },
    T.drawer,
  );

  /** `drawer`: tree and records are in one, which `hold` fills. */
  constructor(
    report: boolean,
    drawer: boolean,
    status: Status,
    private events: FootEvents,
  ) {
    const { save, help, popOut } = events;
    this.root = h(
      'div',
      { class: 'llmdebug-foot' },
      drawer ? this.toggle : null,
      this.walker(T.previousRecord, '↑ p', -1, false),
      this.walker(T.nextRecord, '↓ n', 1, false),
      report ? this.walker(T.previousMismatch, '✗ ↑ P', -1, true) : null,
      report ? this.walker(T.nextMismatch, '✗ ↓ N', 1, true) : null,
      status.root,
      save ? savers(save) : null,
      button(popOut, { class: 'llmdebug-button llmdebug-pop-out', title: T.popOutTitle }, T.popOut),
      button(help, { title: T.keysTitle, 'aria-label': T.keysTitle }, '?'),
    );
  }

  /** Put content into the drawer, and return it. */
  hold(content: HTMLElement): HTMLElement {
    this.drawer.append(content);
    return this.drawer;
  }

  private turn(): void {
    this.drawer.hidden = !this.drawer.hidden;
    this.toggle.setAttribute('aria-expanded', String(!this.drawer.hidden));
    if (!this.drawer.hidden) this.events.opened();
  }

  private walker(label: string, face: string, delta: 1 | -1, mismatch: boolean): HTMLElement {
    return button(
      () => this.events.walk(delta, mismatch),
      { title: label },
      h('span', { 'aria-hidden': 'true' }, face),
      h('span', { class: 'llmdebug-spoken' }, label),
    );
  }
}

function savers(save: (kind: ExportRequest['kind']) => void): HTMLElement {
  const saver = (kind: ExportRequest['kind']) => {
    const title = T.saveAs[kind];
    const props = { 'aria-label': `${T.kinds[kind]}: ${title}`, title };
    return button(() => save(kind), props, T.kinds[kind]);
  };
  return h(
    'div',
    { class: 'llmdebug-savers', role: 'group', 'aria-label': T.save },
    `${T.saveFace} `,
    ...(['html', 'svg', 'png'] as const).map(saver),
  );
}
