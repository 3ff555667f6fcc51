/** The JupyterLab extension: sidebar, commands, tabs, and a button in notebooks. */
import {
  ILabShell,
  ILayoutRestorer,
  type JupyterFrontEnd,
  type JupyterFrontEndPlugin,
} from '@jupyterlab/application';
import { ICommandPalette, MainAreaWidget, WidgetTracker } from '@jupyterlab/apputils';
import { IEditorExtensionRegistry } from '@jupyterlab/codemirror';
import { IDefaultFileBrowser, IFileBrowserFactory } from '@jupyterlab/filebrowser';
import { ILauncher } from '@jupyterlab/launcher';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import type { Widget } from '@lumino/widgets';
import { COMMANDS } from './commands';
import { Desk } from './desk';
import { ExplorerTab, type Shown } from './explorer_tab';
import { icon } from './icon';
import { magicHelp } from './magic_help';
import { codeNotebook, followCell, isRecording, toggleRecording } from './record_cell';
import { openLines } from './open_line';
import { parentOf } from './paths';
import { popOuts } from './pop_out';
import { addRunCommands } from './run_commands';
import { RunsPanel } from './runs_panel';
import { renderSnapshots } from './snapshot';
import { strings } from './strings';
import css from './style.css';

const ID = 'llmdebug-nb:plugin';

interface Settings {
  runsFolder: string;
  dumpOptions: string;
  kernel: string;
}

function activate(
  app: JupyterFrontEnd,
  labShell: ILabShell | null,
  restorer: ILayoutRestorer | null,
  palette: ICommandPalette | null,
  launcher: ILauncher | null,
  translator: ITranslator | null,
  registry: ISettingRegistry | null,
  browsers: IFileBrowserFactory | null,
  browser: IDefaultFileBrowser | null,
  editors: IEditorExtensionRegistry | null,
  rendermime: IRenderMimeRegistry | null,
): void {
  const { commands, shell } = app;
  const t = strings((translator ?? nullTranslator).load('llmdebug_nb'));
  const desk = new Desk(app.serviceManager, t);
  const tabs = new WidgetTracker<MainAreaWidget<ExplorerTab>>({ namespace: 'llmdebug' });
  let settings: Settings = { runsFolder: '', dumpOptions: '', kernel: '' };

  const style = document.createElement('style');
  style.textContent = css;
  document.head.append(style);

  const open = (shown: Shown): void => {
    let tab = tabs.find(
      one => one.content.shown.golden === shown.golden && one.content.shown.mine === shown.mine,
    );
    if (!tab) {
      tab = new MainAreaWidget({ content: new ExplorerTab(shown, desk, t) });
      tab.toolbar.hide();
      // the main area of Notebook 7 holds a single widget
      if (!labShell) tab.content.addClass('jp-llmdebug-down');
      shell.add(tab, labShell ? 'main' : 'down');
      void tabs.add(tab);
    }
    shell.activateById(tab.id);
  };

  const panel = new RunsPanel(
    desk,
    commands,
    () => ({ folders: workspace(shell, browser), name: settings.runsFolder }),
    t,
  );
  addRunCommands(app, panel, browser, open, t);
  const selected = () => [...(browsers?.tracker.currentWidget?.selectedItems() ?? [])];
  const folders = () => {
    const items = selected(); // a single one may also be the file of a report
    return items.length === 1 ? items : items.filter(item => item.type === 'directory');
  };
  commands.addCommand(COMMANDS.openFolder, {
    label: () => (folders().length === 2 ? t.compareWith : t.openWith),
    icon,
    isEnabled: () => [1, 2].includes(folders().length),
    execute: async () => {
      const [golden, mine] = folders();
      if (!golden) return;
      const alone = !mine && golden.type === 'directory';
      // what goes wrong here, the tab says
      const holdsRuns = alone && (await panel.listFolder(golden.path).catch(() => false));
      if (holdsRuns) shell.activateById(panel.id);
      else open({ golden: golden.path, mine: mine?.path ?? '' });
    },
  });
  commands.addCommand(COMMANDS.recordCell, {
    label: t.recordCell,
    caption: t.recordCellCaption,
    icon,
    isEnabled: () => codeNotebook(shell.currentWidget) !== null,
    isToggleable: true,
    isToggled: () => isRecording(shell.currentWidget),
    execute: () => {
      const notebook = codeNotebook(shell.currentWidget);
      if (notebook) toggleRecording(notebook, settings.dumpOptions);
    },
  });

  if (rendermime) renderSnapshots(app, rendermime, t);
  openLines(app, t);
  popOuts(app, labShell ? 'main' : 'down');

  const cellChanged = (): void => commands.notifyCommandChanged(COMMANDS.recordCell);
  const follow = (): void => followCell(shell.currentWidget, cellChanged);
  shell.currentChanged?.connect(follow);
  follow();

  shell.add(panel, 'left', { rank: 600 });
  restorer?.add(panel, panel.id);
  if (restorer)
    void restorer.restore(tabs, {
      command: COMMANDS.open,
      args: tab => ({ ...tab.content.shown }),
      name: tab => `${tab.content.shown.golden}|${tab.content.shown.mine}`,
    });

  for (const command of Object.values(COMMANDS))
    if (command !== COMMANDS.openFolder) palette?.addItem({ command, category: t.category });
  launcher?.add({ command: COMMANDS.show, category: t.other });

  const help = magicHelp(() => codeNotebook(shell.currentWidget)?.sessionContext.session?.kernel);
  editors?.addExtension({
    name: 'llmdebug-nb:help',
    factory: () => ({ instance: () => help, reconfigure: () => null }),
  });

  void registry?.load(ID).then(loaded => {
    const read = (): void => {
      settings = loaded.composite as unknown as Settings;
      desk.use(settings.kernel);
      void panel.refresh();
    };
    read();
    loaded.changed.connect(read);
  });
}

/** Return the folders to search: the root, the file browser's, and those of open documents. */
function workspace(shell: JupyterFrontEnd.IShell, browser: IDefaultFileBrowser | null): string[] {
  const found = new Set(['', browser?.model.path ?? '']);
  for (const widget of shell.widgets('main')) {
    const path = (widget as Widget & { context?: { path?: string } }).context?.path;
    if (path) found.add(parentOf(path));
  }
  return [...found];
}

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'Runs of llmdebug_nb in JupyterLab.',
  autoStart: true,
  optional: [
    ILabShell,
    ILayoutRestorer,
    ICommandPalette,
    ILauncher,
    ITranslator,
    ISettingRegistry,
    IFileBrowserFactory,
    IDefaultFileBrowser,
    IEditorExtensionRegistry,
    IRenderMimeRegistry,
  ],
  activate,
};

export default plugin;
