/**
 * Finds the live widget of an output.
 *
 * The widget manager of a notebook draws it once there is a manager, and once that has read its
 * models from the kernel. Asked too early it says that it knows no such widget, and never tries
 * again.
 */
import type { ISessionContext } from '@jupyterlab/apputils';
import type { IRenderMime, IRenderMimeRegistry } from '@jupyterlab/rendermime';
import type { Widget } from '@lumino/widgets';

const TYPE = 'application/vnd.jupyter.widget-view+json';
/** Milliseconds between a look and the next one, which double. */
const [FIRST, LAST] = [400, 60_000];

/** A document that renders outputs, as a notebook does. */
export type Document = Widget & {
  content?: { rendermime?: IRenderMimeRegistry };
  sessionContext?: Pick<ISessionContext, 'session' | 'connectionStatusChanged'>;
};

/** The id of the widget of an output, as text; '' for none. */
export function widgetOf(model: IRenderMime.IMimeModel): string {
  return JSON.stringify(model.data[TYPE]) ?? '';
}

export class LiveWidget {
  private model?: IRenderMime.IMimeModel;
  private renderer?: IRenderMime.IRenderer;
  /** What made `renderer`. A widget manager brings another one. */
  private factory?: IRenderMime.IRendererFactory;
  private isPending = false;
  private session?: Document['sessionContext'];
  private pause = FIRST;
  private timer?: ReturnType<typeof setTimeout>;
  private observer = new MutationObserver(() => this.show());

  /** `drawn` is called as soon as the widget is drawn into `host`. */
  constructor(
    private host: HTMLElement,
    private document: () => Document | undefined,
    private drawn: () => void,
  ) {}

  get isDrawn(): boolean {
    return this.renderer !== undefined && this.renderer.node.childElementCount > 0;
  }

  /** Look for the widget of `model`: now, ever less often, and anew with each connection. */
  find(model: IRenderMime.IMimeModel): void {
    this.dispose();
    this.model = model;
    this.begin();
  }

  dispose(): void {
    clearTimeout(this.timer);
    this.follow(undefined);
    this.drop();
  }

  private begin(): void {
    clearTimeout(this.timer);
    this.pause = FIRST;
    this.look();
  }

  private look(): void {
    if (this.isDrawn) return;
    const document = this.document();
    this.follow(document?.sessionContext);
    const rendermime = document?.content?.rendermime;
    const factory = rendermime?.mimeTypes.includes(TYPE) ? rendermime.getFactory(TYPE) : undefined;
    // a renderer without a manager never answers, also not when the manager is there
    if (rendermime && factory && !(this.isPending && factory === this.factory)) {
      this.factory = factory;
      this.ask(rendermime.createRenderer(TYPE));
    }
    if (this.pause < LAST) this.timer = setTimeout(() => this.look(), this.pause);
    this.pause *= 2;
  }

  private ask(renderer: IRenderMime.IRenderer): void {
    const { model } = this;
    this.drop();
    if (!model || !widgetOf(model)) return;
    this.renderer = renderer;
    this.isPending = true;
    renderer.node.hidden = true;
    this.observer.observe(renderer.node, { childList: true });
    this.host.append(renderer.node);
    const ended = () => {
      if (renderer !== this.renderer) return;
      this.isPending = false;
      this.show();
    };
    renderer.renderModel(model).then(ended, ended);
  }

  private drop(): void {
    this.observer.disconnect();
    this.renderer?.dispose();
    this.renderer?.node.remove();
    this.renderer = undefined;
    this.isPending = false;
  }

  private show(): void {
    if (!this.renderer || !this.isDrawn) return;
    this.renderer.node.hidden = false;
    this.drawn();
  }

  private follow(session: Document['sessionContext']): void {
    if (session === this.session) return;
    this.session?.connectionStatusChanged.disconnect(this.connected);
    this.session = session;
    session?.connectionStatusChanged.connect(this.connected);
  }

  private connected = (): void => {
    const kernel = this.session?.session?.kernel;
    if (kernel?.connectionStatus === 'connected' && !this.isDrawn) this.begin();
  };
}
