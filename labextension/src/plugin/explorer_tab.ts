/** An explorer in a tab of its own: of a run, or of two compared. Its code comes from the kernel, and so always fits it. */
import type { AnyWidget } from '@anywidget/types';
import { Widget } from '@lumino/widgets';
import type { Channel } from './channel';
import type { Desk } from './desk';
import { icon } from './icon';
import { PageModel } from './page_model';
import type { Strings } from './strings';

/** Paths of runs, or `golden` of a report's file; `mine` "" for golden alone. */
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

  /** A file's page, in a frame that shares nothing with this one. */
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

export function nameOf(path: string): string {
  return path.replace(/[\\/]+$/, '').replace(/^.*[\\/]/, '');
}
