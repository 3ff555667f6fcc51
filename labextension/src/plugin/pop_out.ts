/** Shows a second view of a notebook's explorer in a tab of its own. */
import type { JupyterFrontEnd } from '@jupyterlab/application';
import { MainAreaWidget } from '@jupyterlab/apputils';
import { Widget } from '@lumino/widgets';
import { icon } from './icon';

/** The name of the event that an explorer fires, with its `detail`. */
const EVENT = 'llmdebug:pop-out';
interface PoppedOut {
  title: string;
  /** Draws the view; returns the function that removes it. */
  mount: (el: HTMLElement) => () => void;
}

class View extends Widget {
  private unmount: () => void;

  constructor({ title, mount }: PoppedOut) {
    super();
    this.addClass('jp-llmdebug-tab');
    this.node.tabIndex = -1;
    this.title.icon = icon;
    this.title.label = title;
    this.title.closable = true;
    this.unmount = mount(this.node);
  }

  dispose(): void {
    if (!this.isDisposed) this.unmount();
    super.dispose();
  }
}

/** Listen to the explorers of the page. `area`: where tabs belong. */
export function popOuts({ shell }: JupyterFrontEnd, area: 'main' | 'down'): void {
  document.addEventListener(EVENT, event => {
    event.preventDefault();
    const tab = new MainAreaWidget({ content: new View((event as CustomEvent<PoppedOut>).detail) });
    tab.toolbar.hide();
    if (area === 'down') tab.content.addClass('jp-llmdebug-down');
    shell.add(tab, area, { mode: 'split-right' });
    shell.activateById(tab.id);
  });
}
