/** The kernel behind sidebar and tabs: started when it is first needed, and found again by a page that is loaded anew. */
import type { ServiceManager, Session } from '@jupyterlab/services';
import { Channel } from './channel';
import type { Strings } from './strings';

export type Target = 'llmdebug_nb.runs' | 'llmdebug_nb.explorer';

/** Of no file: it places the kernel in the folder that Jupyter serves. */
const PATH = '.llmdebug';
const START = 'from llmdebug_nb.notebook import desk\ndesk.register(get_ipython())';
const OVER = ['restarting', 'autorestarting', 'terminating', 'dead'];

export class Desk {
  private kernel = '';
  private session?: Promise<Session.ISessionConnection>;
  private live?: Session.ISessionConnection;
  private channels = new Set<Channel>();

  constructor(
    private services: ServiceManager.IManager,
    private t: Strings,
  ) {}

  /** Use the kernel of that name, "" for the default one. */
  use(kernel: string): void {
    if (kernel === this.kernel) return;
    this.kernel = kernel;
    this.forget();
  }

  async channel(target: Target): Promise<Channel> {
    const { kernel } = await (this.session ??= this.start());
    if (!kernel) throw new Error(this.t.noKernel);
    const channel = new Channel(kernel.createComm(target), this.t.gone);
    this.channels.add(channel);
    return channel;
  }

  private async start(): Promise<Session.ISessionConnection> {
    try {
      const session = await this.connect();
      const over = (): void => {
        if (this.live === session) this.forget();
      };
      session.disposed.connect(over);
      session.kernelChanged.connect(over);
      session.statusChanged.connect((_, status) => OVER.includes(status) && over());
      return (this.live = session);
    } catch (error) {
      this.session = undefined;
      throw error;
    }
  }

  private async connect(): Promise<Session.ISessionConnection> {
    const { sessions, kernelspecs } = this.services;
    await Promise.all([sessions.ready, kernelspecs.ready]);
    const name = this.kernel || kernelspecs.specs?.default;
    if (!name) throw new Error(this.t.noKernel);
    await sessions.refreshRunning();
    const model = await sessions.findByPath(PATH);
    const fits = model?.kernel?.name === name;
    if (model && !fits) await sessions.shutdown(model.id);
    const session =
      model && fits
        ? sessions.connectTo({ model })
        : await sessions.startNew({
            path: PATH,
            name: 'llmdebug',
            type: 'llmdebug',
            kernel: { name },
          });
    const reply = await session.kernel!.requestExecute({
      code: START,
      silent: true,
      store_history: false,
    }).done;
    if (reply.content.status === 'ok') return session;
    const why =
      reply.content.status === 'error'
        ? `${reply.content.ename}: ${reply.content.evalue}`
        : reply.content.status;
    await session.shutdown();
    throw new Error(this.t.notInstalled(name, why));
  }

  private forget(): void {
    this.session = this.live = undefined;
    this.channels.forEach(channel => channel.close());
    this.channels.clear();
  }
}
