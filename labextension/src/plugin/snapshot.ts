/**
 * Draws the explorers of saved notebooks.
 *
 * An output holds the id of a widget and a small snapshot. While the widget lives it is shown, else
 * the snapshot, which needs no kernel.
 */
import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { IRenderMime, IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { Widget } from '@lumino/widgets';
import { drawSaved } from '../page/draw';
import type { Strings } from './strings';

const TYPE = 'application/vnd.llmdebug.explorer+json';
const LIVE = 'application/vnd.jupyter.widget-view+json';
/** Before the widget manager's renderer, which has -10. */
const RANK = -20;
/** Milliseconds in which a live widget is drawn, so that no snapshot flashes up before it. */
const PATIENCE = 600;
/** Milliseconds between the tries to find the live widget, which double. */
const [FIRST, LAST] = [400, 60_000];
/** Characters of a snapshot: several times what we write. */
const LARGEST = 2_000_000;

/** Register the renderer, for the notebooks that are opened from now on. */
export function renderSnapshots(app: JupyterFrontEnd, registry: IRenderMimeRegistry, t: Strings) {
  registry.addFactory(
    { safe: true, mimeTypes: [TYPE], createRenderer: () => new Snapshot(app, t) },
    RANK,
  );
}

/** A document that renders outputs, as a notebook does. */
type Document = Widget & { content?: { rendermime?: IRenderMimeRegistry } };

/** Return the packed snapshot of an output; '' for none. */
function textOf(model: IRenderMime.IMimeModel): string {
  const data = model.data[TYPE] as { data?: unknown } | undefined;
  return typeof data?.data === 'string' ? data.data : '';
}

function isSame(one: IRenderMime.IMimeModel, other: IRenderMime.IMimeModel): boolean {
  const widgets = [one, other].map(model => JSON.stringify(model.data[LIVE]));
  return textOf(one) === textOf(other) && widgets[0] === widgets[1];
}

class Snapshot extends Widget implements IRenderMime.IRenderer {
  private model?: IRenderMime.IMimeModel;
  private drawn?: () => void;
  private live?: IRenderMime.IRenderer;
  private timer?: ReturnType<typeof setTimeout>;
  private observer = new MutationObserver(() => this.change());
  /** How often drawing began: an output is rendered again when it is trusted, or updated. */
  private round = 0;
  private saved = document.createElement('div');

  constructor(
    private app: JupyterFrontEnd,
    private t: Strings,
  ) {
    super();
    this.node.append(this.saved);
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const same = this.model && isSame(this.model, model);
    this.model = model;
    if (this.isAttached && !(same && this.round)) await this.draw();
  }

  dispose(): void {
    if (this.isDisposed) return;
    clearTimeout(this.timer);
    this.observer.disconnect();
    this.drawn?.();
    this.live?.dispose();
    super.dispose();
  }

  protected onAfterAttach(): void {
    if (this.model && !this.round) void this.draw();
  }

  private get isLive(): boolean {
    return this.live !== undefined && this.live.node.childElementCount > 0;
  }

  private async draw(): Promise<void> {
    const round = ++this.round;
    clearTimeout(this.timer);
    this.live?.dispose();
    this.live = undefined;
    this.timer = setTimeout(() => !this.isLive && void this.drawSnapshot(round), PATIENCE);
    for (let pause = FIRST; pause < LAST && !this.isDisposed && !this.isLive; pause *= 2) {
      if (round !== this.round) return;
      this.ask();
      await new Promise(done => setTimeout(done, pause));
    }
  }

  /**
   * Ask the widget manager, which draws an element, or says that it knows no such widget.
   *
   * It may say so too early, before it has read its models, and never tries again.
   */
  private ask(): void {
    const { model } = this;
    const rendermime = this.document?.content?.rendermime;
    if (!model || !(LIVE in model.data) || !rendermime?.mimeTypes.includes(LIVE)) return;
    this.observer.disconnect();
    this.live?.dispose();
    const live = (this.live = rendermime.createRenderer(LIVE));
    live.node.hidden = true;
    this.observer.observe(live.node, { childList: true });
    this.node.append(live.node);
    void live.renderModel(model).then(() => this.change()); // without a manager it never ends
  }

  /** Show the widget as soon as it is drawn. */
  private change(): void {
    if (!this.live || !this.isLive) return;
    this.live.node.hidden = false;
    this.drawn?.();
    this.drawn = undefined;
    this.saved.replaceChildren();
  }

  private async drawSnapshot(round: number): Promise<void> {
    const text = this.model ? textOf(this.model) : '';
    if (!text || text.length > LARGEST) return this.fail();
    try {
      this.drawn?.();
      this.drawn = undefined;
      const undraw = await drawSaved(this.saved, text);
      if (this.isLive || this.isDisposed || round !== this.round) undraw();
      else this.drawn = undraw;
    } catch {
      if (!this.isLive && round === this.round) this.fail();
    }
  }

  private fail(): void {
    this.saved.textContent = this.t.noSnapshot;
  }

  private get document(): Document | undefined {
    return [...this.app.shell.widgets('main')].find(one => one.node.contains(this.node));
  }
}
