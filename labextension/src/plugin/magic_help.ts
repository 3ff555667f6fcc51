/** Tooltips for our magics and their options, with the help text of the notebook's kernel. */
import { hoverTooltip } from '@codemirror/view';
import type { Kernel } from '@jupyterlab/services';

type Extension = ReturnType<typeof hoverTooltip>;

const MAGIC = /^\s*%%?(llm\w+)\b/;
// eslint-disable-next-line no-control-regex -- terminal colours begin with ESC
const COLOURS = /\x1b\[[\d;]*m/g;

export function magicHelp(kernel: () => Kernel.IKernelConnection | null | undefined): Extension {
  const known = new WeakMap<Kernel.IKernelConnection, Map<string, string>>();

  const helpOf = async (magic: string): Promise<string> => {
    const current = kernel();
    if (!current) return '';
    const cached = known.get(current)?.get(magic);
    if (cached) return cached;
    const request = { code: `%${magic}`, cursor_pos: magic.length + 1, detail_level: 0 } as const;
    const { content } = await current.requestInspect(request);
    if (content.status !== 'ok' || !content.found) return '';
    const text = (content.data['text/plain'] as string)
      .replace(COLOURS, '')
      .replace(/^Docstring:\s*(::\s*)?/, '')
      .replace(/^File:[^]*/m, '')
      .trim();
    const texts = known.get(current) ?? new Map<string, string>();
    if (text) known.set(current, texts.set(magic, text));
    return text;
  };

  return hoverTooltip(async (view, pos) => {
    const line = view.state.doc.lineAt(pos);
    const magic = MAGIC.exec(line.text)?.[1];
    if (!magic) return null;
    const at = pos - line.from;
    const start = line.text.slice(0, at).search(/\S+$/);
    const from = start < 0 ? at : start;
    const word = /^\S*/.exec(line.text.slice(from))![0].replace(/=.*/, '');
    const isName = word.replace(/^%+/, '') === magic;
    if (!isName && !word.startsWith('--')) return null;
    const help = await helpOf(magic);
    const text = isName ? help : optionOf(help, word);
    if (!text) return null;
    return {
      pos: line.from + from,
      end: line.from + from + word.length,
      above: true,
      create: () => {
        const dom = document.createElement('pre');
        dom.className = 'jp-llmdebug-help';
        dom.setAttribute('role', 'tooltip');
        dom.textContent = text;
        return { dom };
      },
    };
  });
}

/** Return the paragraph on an option from argparse's help text, '' if there is none. */
export function optionOf(help: string, option: string): string {
  const lines = help.split('\n');
  const first = lines.findIndex(line => line.trimStart().split(/[\s,]/)[0] === option);
  if (first < 0) return '';
  const rest = lines.slice(first + 1);
  const end = rest.findIndex(line => !/^ {8}/.test(line));
  const more = end < 0 ? rest : rest.slice(0, end);
  return [lines[first]!, ...more]
    .map(line => line.trim())
    .join(' ')
    .replace(/ {2,}/g, '\n');
}
