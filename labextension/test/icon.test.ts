// @vitest-environment happy-dom
import { expect, test, vi } from 'vitest';
import schema from '../schema/plugin.json';
import { icon } from '../src/plugin/icon';

vi.mock('@jupyterlab/ui-components', async () => (await import('./jupyter')).ui);

test('the icon has the name that the settings give', () => {
  expect(schema['jupyter.lab.icon']).toBe(icon.name);
});

test('the icon takes the colour of the theme', () => {
  expect(decodeURIComponent(icon.svgstr)).toContain('jp-icon3');
});
