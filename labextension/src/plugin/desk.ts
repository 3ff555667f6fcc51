/** The kernel of the sidebar and the tabs. It starts on demand; a reloaded page finds it again. */
import type { ServiceManager, Session } from '@jupyterlab/services';
import { Channel } from './channel';
import type { Strings } from './strings';

export type Target = 'llmdebug_nb.runs' | 'llmdebug_nb.explorer';

/** No such file exists: the path makes the kernel start in Jupyter's root folder. */
const PATH = '.llmdebug';
const START = 'from llmdebug_nb.notebook import desk\ndesk.register(get_ipython())';
const ENDED = ['restarting', 'autorestarting', 'terminating', 'dead'];

export class Desk {
  private kernel = '';
  private session?: Promise<Session.ISessionConnection>;
  private channels = new Set<Channel>();

  constructor(
    private services: ServiceManager.IManager,
    private t: Strings,
  ) {}

  /** Use the kernel of this name, '' for the default one. */
  use(kernel: string): void {
    if (kernel === this.kernel) return;
    this.kernel = kernel;
    this.forget();
  }

  /** Open a channel; start the kernel if necessary. */
  async channel(target: Target): Promise<Channel> {
    const started = (this.session ??= this.start());
    const session = await started.catch((error: unknown) => {
      if (!this.session) throw error;
    });
    if (!session || started !== this.session) return this.channel(target); // another is used now
    const { kernel } = session;
    if (!kernel) throw new Error(this.t.noKernel);
    const channel = new Channel(kernel.createComm(target), this.t.gone);
    this.channels.add(channel);
    return channel;
  }

  private start(): Promise<Session.ISessionConnection> {
    const started = this.connect();
    const ended = (): void => {
      if (this.session === started) this.forget();
    };
    void started.then(session => {
      session.disposed.connect(ended);
      session.kernelChanged.connect(ended);
      session.statusChanged.connect((_, status) => ENDED.includes(status) && ended());
    }, ended);
    return started;
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
    const options = { path: PATH, name: 'llmdebug', type: 'llmdebug', kernel: { name } };
    const session =
      model && fits ? sessions.connectTo({ model }) : await sessions.startNew(options);
    const request = { code: START, silent: true, store_history: false };
    const { content } = await session.kernel!.requestExecute(request).done;
    if (content.status === 'ok') return session;
    await session.shutdown();
    const why = content.status === 'error' ? `${content.ename}: ${content.evalue}` : content.status;
    throw new Error(this.t.notInstalled(name, why));
  }

  private forget(): void {
    this.session = undefined;
    this.channels.forEach(channel => channel.close());
    this.channels.clear();
  }
}
