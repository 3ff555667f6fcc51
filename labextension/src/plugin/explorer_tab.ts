/** A tab with an explorer of a run, or of two compared runs. The kernel sends its code. */
import type { AnyWidget } from '@anywidget/types';
import { Widget } from '@lumino/widgets';
import type { Channel } from './channel';
import type { Desk } from './desk';
import { icon } from './icon';
import { PageModel } from '../protocol/page_model';
import { nameOf } from './paths';
import type { Strings } from './strings';

/** Paths of two runs; or `golden` alone, a run or a report's file, with `mine` ''. */
export interface Shown {
  golden: string;
  mine: string;
}

export class ExplorerTab extends Widget {
  private channel?: Channel;
  private unmount?: () => void;

  constructor(
    readonly shown: Shown,
    private desk: Desk,
    private t: Strings,
  ) {
    super();
    this.addClass('jp-llmdebug-tab');
    this.node.tabIndex = -1;
    this.title.icon = icon;
    this.title.label = t.tab(nameOf(shown.golden), nameOf(shown.mine));
    this.title.caption = [shown.golden, shown.mine].filter(Boolean).join('\n');
    this.title.closable = true;
    void this.load();
  }

  dispose(): void {
    this.leave();
    super.dispose();
  }

  private async load(): Promise<void> {
    const { shown, t } = this;
    const [golden, mine] = [nameOf(shown.golden), nameOf(shown.mine)];
    this.say('status', mine ? t.comparing(golden, mine) : t.opening(golden));
    try {
      this.channel = await this.desk.channel('llmdebug_nb.explorer');
      if (this.isDisposed) return this.leave();
      const opened = await this.channel.ask('open', { ...shown });
      if (opened.page) return this.display(opened.page, opened.scripts);
      const url = URL.createObjectURL(new Blob([opened.code], { type: 'text/javascript' }));
      const code = (await import(url)) as { default: AnyWidget & { render: Render } };
      URL.revokeObjectURL(url);
      if (this.isDisposed) return this.leave();
      this.node.replaceChildren();
      this.unmount = code.default.render({
        model: new PageModel(opened.traits, this.channel).asModel(),
        el: this.node,
      });
    } catch (error) {
      this.leave();
      if (!this.isDisposed) this.fail((error as Error).message);
    }
  }

  /** Show a report's HTML page, in an isolated frame. */
  private display(page: string, scripts: boolean): void {
    const frame = document.createElement('iframe');
    frame.title = this.title.label;
    frame.className = 'jp-llmdebug-page';
    frame.setAttribute('sandbox', scripts ? 'allow-scripts' : '');
    frame.srcdoc = page;
    this.node.replaceChildren(frame);
  }

  private fail(why: string): void {
    this.say('alert', this.t.failed(why));
    const again = document.createElement('button');
    again.textContent = this.t.retry;
    again.onclick = () => void this.load();
    this.node.append(again);
  }

  private say(role: string, text: string): void {
    const line = document.createElement('p');
    line.setAttribute('role', role);
    line.textContent = text;
    this.node.replaceChildren(line);
  }

  private leave(): void {
    this.unmount?.();
    this.channel?.dispose();
    this.unmount = this.channel = undefined;
  }
}

type Render = (props: { model: unknown; el: HTMLElement }) => () => void;
