/** Help under the pointer for our magics and their options, as the notebook's own kernel tells it. */
import { hoverTooltip } from '@codemirror/view';
import type { Kernel } from '@jupyterlab/services';

type Extension = ReturnType<typeof hoverTooltip>;

const MAGIC = /^\s*%%?(llmdump|llmcompare|llmexplore|llmruns)\b/;
const COLOURS = /\x1b\[[\d;]*m/g;

export function magicHelp(kernel: () => Kernel.IKernelConnection | null | undefined): Extension {
  const known = new WeakMap<Kernel.IKernelConnection, Map<string, string>>();

  const helpOf = async (magic: string): Promise<string> => {
    const asked = kernel();
    if (!asked) return '';
    const before = known.get(asked)?.get(magic);
    if (before) return before;
    const reply = await asked.requestInspect({
      code: `%${magic}`,
      cursor_pos: magic.length + 1,
      detail_level: 0,
    });
    const found =
      reply.content.status === 'ok' && reply.content.found
        ? String(reply.content.data['text/plain'])
        : '';
    const text = found
      .replace(COLOURS, '')
      .replace(/^Docstring:\s*(::\s*)?/, '')
      .replace(/^File:[^]*/m, '')
      .trim();
    if (text) known.set(asked, (known.get(asked) ?? new Map<string, string>()).set(magic, text));
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

/** Return the paragraph of an option in argparse's help. */
function optionOf(help: string, option: string): string {
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
