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
import { LiveWidget, widgetOf, type Document } from './live_widget';
import type { Strings } from './strings';

const TYPE = 'application/vnd.llmdebug.explorer+json';
/** Before the widget manager's renderer, which has -10. */
const RANK = -20;
/** Milliseconds in which a live widget is drawn, so that no snapshot flashes up before it. */
const PATIENCE = 600;
/** Characters of a snapshot: several times what we write. */
const LARGEST = 2_000_000;

/** Register the renderer, for the notebooks that are opened from now on. */
export function renderSnapshots(app: JupyterFrontEnd, registry: IRenderMimeRegistry, t: Strings) {
  registry.addFactory(
    { safe: true, mimeTypes: [TYPE], createRenderer: () => new Snapshot(app, t) },
    RANK,
  );
}

/** Return the packed snapshot of an output; '' for none. */
function textOf(model: IRenderMime.IMimeModel): string {
  const data = model.data[TYPE] as { data?: unknown } | undefined;
  return typeof data?.data === 'string' ? data.data : '';
}

function isSame(one: IRenderMime.IMimeModel, other: IRenderMime.IMimeModel): boolean {
  return textOf(one) === textOf(other) && widgetOf(one) === widgetOf(other);
}

class Snapshot extends Widget implements IRenderMime.IRenderer {
  private model?: IRenderMime.IMimeModel;
  private drawn?: () => void;
  private timer?: ReturnType<typeof setTimeout>;
  /** How often drawing began: an output is rendered again when it is trusted, or updated. */
  private round = 0;
  private saved = document.createElement('div');
  private live = new LiveWidget(
    this.node,
    () => this.document,
    () => this.undraw(),
  );

  constructor(
    private app: JupyterFrontEnd,
    private t: Strings,
  ) {
    super();
    this.node.append(this.saved);
  }

  renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const same = this.model && isSame(this.model, model);
    this.model = model;
    if (this.isAttached && !(same && this.round)) this.draw(model);
    return Promise.resolve();
  }

  dispose(): void {
    if (this.isDisposed) return;
    clearTimeout(this.timer);
    this.live.dispose();
    this.drawn?.();
    super.dispose();
  }

  protected onAfterAttach(): void {
    if (this.model && !this.round) this.draw(this.model);
  }

  private draw(model: IRenderMime.IMimeModel): void {
    const round = ++this.round;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => !this.live.isDrawn && void this.drawSnapshot(round), PATIENCE);
    this.live.find(model);
  }

  private undraw(): void {
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
      if (this.live.isDrawn || this.isDisposed || round !== this.round) undraw();
      else this.drawn = undraw;
    } catch {
      if (!this.live.isDrawn && round === this.round) this.fail();
    }
  }

  private fail(): void {
    this.saved.textContent = this.t.noSnapshot;
  }

  private get document(): Document | undefined {
    return [...this.app.shell.widgets('main')].find(one => one.node.contains(this.node));
  }
}
