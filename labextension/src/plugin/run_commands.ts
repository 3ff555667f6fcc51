/** The commands on the runs and reports selected in the sidebar. */
import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, showDialog } from '@jupyterlab/apputils';
import type { IDefaultFileBrowser } from '@jupyterlab/filebrowser';
import { COMMANDS } from './commands';
import type { Shown } from './explorer_tab';
import { icon } from './icon';
import { nameOf, parentOf } from './paths';
import type { RunsPanel } from './runs_panel';
import type { Strings } from './strings';

export function addRunCommands(
  { commands, shell }: JupyterFrontEnd,
  panel: RunsPanel,
  browser: IDefaultFileBrowser | null,
  open: (shown: Shown) => void,
  t: Strings,
): void {
  const selection = () => panel.selection;
  const one = () => selection().length === 1;
  const two = () => selection().length === 2 && selection().every(run => run.kind === 'run');
  commands.addCommand(COMMANDS.show, {
    label: t.showRuns,
    caption: t.showRunsCaption,
    icon,
    execute: () => shell.activateById(panel.id),
  });
  commands.addCommand(COMMANDS.open, {
    label: t.openSelected,
    caption: t.openCaption,
    isEnabled: args => typeof args.golden === 'string' || one(),
    execute: args => {
      const { golden, mine } = args as unknown as Partial<Shown>;
      const run = one() ? selection()[0] : undefined;
      if (typeof golden === 'string') open({ golden, mine: mine ?? '' });
      else if (run) open({ golden: run.path, mine: '' });
    },
  });
  commands.addCommand(COMMANDS.compare, {
    label: t.compareSelected,
    caption: t.compareCaption,
    isEnabled: () => two(),
    execute: () => {
      const [golden, mine] = selection();
      if (golden && mine && two()) open({ golden: golden.path, mine: mine.path });
    },
  });
  commands.addCommand(COMMANDS.swap, {
    label: t.swapSelected,
    caption: t.swapCaption,
    isEnabled: () => two(),
    execute: () => panel.swap(),
  });
  commands.addCommand(COMMANDS.reveal, {
    label: t.revealSelected,
    caption: t.revealCaption,
    isEnabled: () => one() && !!browser && !!selection()[0]?.place,
    execute: async () => {
      const place = selection()[0]?.place;
      if (!browser || !place) return;
      await browser.model.cd('/' + parentOf(place));
      shell.activateById(browser.id);
      await browser.selectItemByName(nameOf(place));
    },
  });
  commands.addCommand(COMMANDS.delete, {
    label: t.deleteSelected,
    caption: t.deleteCaption,
    isEnabled: () => selection().length > 0,
    execute: async () => {
      const runs = selection();
      if (!runs.length) return;
      const buttons = [
        Dialog.cancelButton({ label: t.cancel }),
        Dialog.warnButton({ label: t.delete }),
      ];
      const { button } = await showDialog({
        title: t.deleteTitle,
        body: t.deleteBody(runs.map(run => run.name).join(', ')),
        buttons,
        defaultButton: 0,
      });
      if (button.accept) await panel.delete(runs);
    },
  });
}
