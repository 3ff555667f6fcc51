// @vitest-environment happy-dom
import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { Widget } from '@lumino/widgets';
import { expect, test, vi } from 'vitest';
import { popOuts } from '../src/plugin/pop_out';
import { app } from './jupyter';

vi.mock('@jupyterlab/ui-components', async () => (await import('./jupyter')).ui);
vi.mock('@jupyterlab/apputils', async () => (await import('./jupyter')).apputils);

const lab = app();
const notebook = app();
popOuts(lab as unknown as JupyterFrontEnd, 'main');

function fire(title = '<b>golden</b>') {
  const unmount = vi.fn();
  const mount = vi.fn((el: HTMLElement) => {
    el.append('explorer');
    return unmount;
  });
  const event = new CustomEvent('llmdebug:pop-out', {
    bubbles: true,
    cancelable: true,
    detail: { title, mount },
  });
  document.body.dispatchEvent(event);
  const [tab, area, options] = lab.shell.add.mock.calls.at(-1)!;
  const { content } = tab as Widget & { content: Widget };
  return { event, tab, area, options, content, unmount };
}

test('the explorer gets a tab beside the notebook, which is shown', () => {
  const { event, tab, area, options, content } = fire();
  expect(event.defaultPrevented).toBe(true); // else the explorer fills the screen
  expect([area, options]).toEqual(['main', { mode: 'split-right' }]);
  expect(lab.shell.activateById).toHaveBeenLastCalledWith(tab.id);
  expect([content.node.textContent, content.title.label, content.title.closable]).toEqual([
    'explorer',
    '<b>golden</b>',
    true,
  ]);
});

test('closing the tab removes the view once', () => {
  const { content, unmount } = fire();
  content.dispose();
  content.dispose();
  expect(unmount).toHaveBeenCalledOnce();
});

test('each view has a tab of its own', () => {
  expect(fire().tab).not.toBe(fire().tab);
});

test('where the main area holds one widget, the tab opens below', () => {
  popOuts(notebook as unknown as JupyterFrontEnd, 'down');
  fire();
  const [tab, area] = notebook.shell.add.mock.calls.at(-1)!;
  expect(area).toBe('down');
  expect((tab as Widget & { content: Widget }).content.hasClass('jp-llmdebug-down')).toBe(true);
});
