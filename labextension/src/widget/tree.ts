/** The model tree. Children are fetched when a module is opened; only rows in view exist. */
import { clamp, h, swallow, uniqueId } from './dom';
import type { Ask } from './rpc';
import { pathText } from './format';
import { VERDICTS } from './strings';
import * as T from './strings';
import { VirtualList } from './virtual';
import type { TreeNode } from './wire';

const ROW = 24;
const PAGE = 500;
const ROOTS = -1;

interface Kids {
  total: number;
  nodes: TreeNode[];
  loading?: Promise<boolean>;
}
/** A line of the tree: a node, or a placeholder for the next page of `parent`'s children. */
interface Line {
  depth: number;
  parent: number;
  node?: TreeNode;
}

export class Tree {
  readonly root: HTMLElement;
  selected: TreeNode | null = null;
  private list = new VirtualList({
    item: ROW,
    render: i => this.line(i),
    painted: () => this.loadMoreInView(),
  });
  private uid = uniqueId();
  private kids = new Map<number, Kids>();
  private open = new Set<number>();
  private lines: Line[] = [];
  private cursor = 0;
  private here: string | null = null;

  constructor(
    private ask: Ask,
    private choose: (node: TreeNode) => void,
  ) {
    this.root = h('nav', { class: 'llmdebug-tree', 'aria-label': T.tree }, this.list.root);
    this.list.root.setAttribute('role', 'tree');
    this.list.root.setAttribute('aria-label', T.tree);
    this.list.root.addEventListener('click', event => this.click(event));
    this.list.root.addEventListener('keydown', event => this.key(event));
  }

  /** Open the ancestors of the module at `path`. Return it, or its nearest existing ancestor. */
  async find(path: string): Promise<TreeNode | null> {
    const reply = await this.ask('path', { path });
    let node: TreeNode | null = null;
    for (const id of reply?.answer.ids ?? []) {
      if (node) this.open.add(node.id);
      const child = await this.child(node?.id ?? ROOTS, id);
      if (!child) break;
      node = child;
    }
    return node;
  }

  /** Unfold the tree down to `path`, without selecting it. */
  async reveal(path: string): Promise<void> {
    const node = await this.find(path);
    this.update();
    const at = node ? this.lines.findIndex(line => line.node?.id === node.id) : -1;
    if (at >= 0) this.list.reveal(at);
  }

  /** Mark `node` as the module whose records are listed. */
  mark(node: TreeNode | null): void {
    this.selected = node;
    this.update();
    const at = node ? this.lines.findIndex(line => line.node?.id === node.id) : -1;
    if (at < 0) return;
    this.cursor = at;
    this.list.reveal(at);
  }

  /** Highlight the module of the selected record, or the closed ancestor that hides it. */
  pointAt(path: string | null): void {
    this.here = path;
    this.list.refresh();
  }

  /** Fetch all open modules again. The tree stays as it is until they arrive. */
  async reload(): Promise<void> {
    const { kids } = this;
    this.kids = new Map();
    await Promise.all(
      [ROOTS, ...this.open].map(async parent => {
        const wanted = kids.get(parent)?.nodes.length ?? 0;
        while ((this.kids.get(parent)?.nodes.length ?? 0) < wanted && (await this.load(parent)));
      }),
    );
    this.update();
  }

  /** Show the tree of another model. */
  async restart(): Promise<void> {
    this.kids = new Map();
    this.open = new Set();
    this.selected = this.here = null;
    await this.start();
  }

  dispose(): void {
    this.list.dispose();
  }

  /** Fetch the roots. Open a single one at once. */
  async start(): Promise<void> {
    await this.load(ROOTS);
    const roots = this.kids.get(ROOTS);
    const first = roots?.nodes[0];
    if (roots?.total === 1 && first?.children) await this.expand(first);
    this.update();
  }

  /** Fetch the next page of a module's children. Return false if there is none. */
  private load(parent: number): Promise<boolean> {
    const kids = this.kids.get(parent) ?? { total: -1, nodes: [] };
    this.kids.set(parent, kids);
    if (kids.nodes.length === kids.total) return Promise.resolve(false);
    kids.loading ??= this.request(parent, kids);
    return kids.loading;
  }

  private async request(parent: number, kids: Kids): Promise<boolean> {
    const reply = await this.ask('children', { parent, start: kids.nodes.length, n: PAGE });
    kids.loading = undefined;
    if (!reply) return this.shut(parent);
    kids.total = reply.answer.total;
    kids.nodes.push(...reply.answer.nodes);
    return reply.answer.nodes.length > 0;
  }

  /** Close a module after an error; opening it again fetches it again. */
  private shut(parent: number): false {
    this.kids.delete(parent);
    this.open.delete(parent);
    return false;
  }

  private async child(parent: number, id: number): Promise<TreeNode | undefined> {
    for (;;) {
      const found = this.kids.get(parent)?.nodes.find(node => node.id === id);
      if (found || !(await this.load(parent))) return found;
    }
  }

  private async expand(node: TreeNode): Promise<void> {
    this.open.add(node.id);
    if (!this.kids.has(node.id)) await this.load(node.id);
    this.update();
  }

  private toggle(node: TreeNode): void {
    if (this.open.delete(node.id)) this.update();
    else if (node.children) void this.expand(node);
  }

  private update(): void {
    const before = this.lines[this.cursor]?.node;
    this.lines = [];
    this.flatten(ROOTS, 0);
    const moved = before ? this.lines.findIndex(line => line.node?.id === before.id) : -1;
    this.cursor = moved >= 0 ? moved : clamp(this.cursor, 0, Math.max(0, this.lines.length - 1));
    this.list.setCount(this.lines.length);
  }

  private flatten(parent: number, depth: number): void {
    const kids = this.kids.get(parent);
    if (!kids) return;
    for (const node of kids.nodes) {
      this.lines.push({ depth, parent, node });
      if (this.open.has(node.id)) this.flatten(node.id, depth + 1);
    }
    if (kids.nodes.length < kids.total) this.lines.push({ depth, parent });
  }

  private loadMoreInView(): void {
    for (let i = this.list.first; i < this.list.last; i++) {
      const line = this.lines[i];
      if (line && !line.node) void this.load(line.parent).then(() => this.update());
    }
    const active = this.lines[this.cursor]?.node;
    this.list.root.setAttribute('aria-activedescendant', active ? `${this.uid}-${active.id}` : '');
  }

  private line(i: number): HTMLElement {
    const { depth, node, parent } = this.lines[i]!;
    const style = `height:${ROW}px;padding-left:${depth * 14 + 4}px`;
    if (!node) {
      const { total, nodes } = this.kids.get(parent)!;
      return h(
        'div',
        { class: 'llmdebug-node llmdebug-dim', style },
        T.moreNodes(total - nodes.length),
      );
    }
    const verdict = node.verdict && VERDICTS[node.verdict].text;
    const nothing = node.rows ? '' : T.nothingRecorded;
    const hint = [pathText(node.path), node.type, verdict, node.note, nothing].filter(Boolean);
    const classes = [
      'llmdebug-node',
      !node.rows && 'llmdebug-unrecorded',
      i === this.cursor && 'llmdebug-cursor',
      this.isHere(node) && 'llmdebug-here',
    ];
    return h(
      'div',
      {
        class: classes.filter(Boolean).join(' '),
        id: `${this.uid}-${node.id}`,
        role: 'treeitem',
        style,
        title: hint.join(' · '),
        'aria-level': depth + 1,
        'aria-expanded': node.children ? String(this.open.has(node.id)) : undefined,
        'aria-selected': String(node.id === this.selected?.id),
      },
      ...nodeParts(node, this.open.has(node.id)),
    );
  }

  private isHere(node: TreeNode): boolean {
    if (this.here === null || node.path === this.here) return node.path === this.here;
    return !this.open.has(node.id) && (node.path === '' || this.here.startsWith(`${node.path}.`));
  }

  private click(event: MouseEvent): void {
    const index = this.list.indexAt(event);
    const node = this.lines[index]?.node;
    if (!node) return;
    this.cursor = index;
    if ((event.target as HTMLElement).closest('.llmdebug-chevron') && node.children)
      this.toggle(node);
    else this.take(node);
  }

  /** Select a module; the first time, also open it. */
  private take(node: TreeNode): void {
    if (node.children && !this.kids.has(node.id)) void this.expand(node);
    this.choose(node);
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.lines.length - 1;
    const node = this.lines[this.cursor]?.node;
    const moves: Record<string, number> = {
      ArrowDown: this.cursor + 1,
      ArrowUp: this.cursor - 1,
      Home: 0,
      End: last,
      PageDown: this.cursor + this.list.page,
      PageUp: this.cursor - this.list.page,
    };
    const to = moves[event.key];
    if (to !== undefined) this.move(clamp(to, 0, Math.max(0, last)));
    else if (event.key === 'ArrowRight' && node) this.inwards(node);
    else if (event.key === 'ArrowLeft' && node) this.outwards(node);
    else if ((event.key === 'Enter' || event.key === ' ') && node) this.take(node);
    else return;
    swallow(event);
  }

  private move(index: number): void {
    this.cursor = index;
    this.list.reveal(index);
  }

  private inwards(node: TreeNode): void {
    if (!node.children) return;
    if (this.open.has(node.id)) this.move(Math.min(this.cursor + 1, this.lines.length - 1));
    else void this.expand(node);
  }

  private outwards(node: TreeNode): void {
    if (this.open.has(node.id)) return this.toggle(node);
    const parent = this.lines[this.cursor]!.parent;
    const at = this.lines.findIndex(line => line.node?.id === parent);
    if (at >= 0) this.move(at);
  }
}

function nodeParts(node: TreeNode, open: boolean): HTMLElement[] {
  const { label, type, verdict, unmatched, expected, note, bad } = node;
  const colour = verdict ? ` llmdebug-${verdict}` : '';
  const chevron = node.children ? (open ? '▾' : '▸') : '';
  const parts = [
    h('span', { class: 'llmdebug-chevron', 'aria-hidden': 'true' }, chevron),
    h('span', { class: `llmdebug-node-label${colour}` }, label),
    h('span', { class: 'llmdebug-node-type' }, type === label ? '' : type),
  ];
  if (verdict) {
    const { mark, text } = VERDICTS[verdict];
    const props = { class: `llmdebug-node-verdict${colour}`, role: 'img', 'aria-label': text };
    parts.push(h('span', props, mark));
  }
  const counted = (name: string, title: string, n: number, mark: string) =>
    n && parts.push(h('span', { class: name, title }, `${mark}${n.toLocaleString('en')}`));
  counted('llmdebug-alone', T.unmatched(unmatched), unmatched, '? ');
  counted('llmdebug-known', note, expected, '☑ ');
  counted('llmdebug-badge', T.bad(bad), bad, '');
  return parts;
}
