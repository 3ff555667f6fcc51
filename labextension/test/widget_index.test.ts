// @vitest-environment happy-dom
import type { RenderProps } from '@anywidget/types';
import { expect, test } from 'vitest';
import { PageModel } from '../src/protocol/page_model';
import type { Traits } from '../src/widget/explorer';
import widget from '../src/widget/index';
import { overview } from './fakes';

test('a widget is drawn with its style, and removed without a trace', () => {
  const el = document.createElement('div');
  document.body.replaceChildren(el);
  const snapshot = overview({ kind: 'run', title: 'my run' });
  const traits = { snapshot, position: 0, selected: -1, path: '' };
  const model = new PageModel(traits, { send: () => undefined }).asModel();
  const remove = widget.render({ model, el } as unknown as RenderProps<Traits>);
  expect([el.querySelector('style'), el.querySelector('h2')!.textContent]).toEqual([
    expect.anything(),
    'my run',
  ]);
  remove();
  expect(el.childElementCount).toBe(0);
});
