// Generated from llmdebug_nb/show/wire.py by `python labextension/wire_types.py`. Do not edit.

export type Num = number | string | null;
export type Which = 'golden' | 'mine' | 'difference';
export type Tab = 'golden' | 'mine' | 'difference' | 'all';
export type Relation = 'inputs' | 'outputs' | 'consumers' | 'siblings';
export type Verdict = 'match' | 'within_noise' | 'expected' | 'diverged' | 'unmatched' | 'nondeterministic';
export type Sort = '' | 'step' | 'seq' | 'path' | 'op' | 'dtype' | 'shape' | 'error' | 'limit' | 'verdict';
export type Scope = 'tensor' | 'step' | 'module';

/** One stop of the token stepper. ``label`` is ready to show: ``0 prefill``. ``text``: the tokens that the step was given, "" if not known. */
export interface Step {
  index: number;
  generation: number;
  step: number;
  kind: string;
  label: string;
  text: string;
  rows: number;
  bad: number;
}

/**
 * A module. ``rows``/``bad``/``unmatched``/``expected``: recorded (diverged, unpaired, expected) rows at it and below, all steps.
 *
 * ``verdict``: the worst of them, on what could be compared; None in a run. ``note``: its other names, and what was said of what is expected.
 */
export interface TreeNode {
  id: number;
  label: string;
  path: string;
  type: string;
  children: number;
  rows: number;
  bad: number;
  unmatched: number;
  expected: number;
  verdict: Verdict | null;
  note: string;
}

export interface Children {
  total: number;
  nodes: TreeNode[];
}

/**
 * A record of a run, or a pair of a report. ``step`` indexes the stepper.
 *
 * ``expected``: what was said of it where it is expected, "" where it isn't. ``mark``: the place of what says so in the overview's list; -1: nothing
 * does by itself.
 */
export interface Row {
  id: number;
  step: number;
  seq: number;
  path: string;
  call: number;
  role: string;
  slot: string;
  op: string;
  dtype: string;
  shape: number[];
  min: Num;
  max: Num;
  mean: Num;
  l2norm: Num;
  nan: number;
  inf: number;
  kept: boolean;
  verdict: Verdict | null;
  error: Num;
  limit: Num;
  reason: string;
  expected: string;
  mark: number;
}

/** ``problem``: why the text of the filter can't be read, "" if it can. */
export interface Page {
  total: number;
  start: number;
  rows: Row[];
  problem: string;
}

/**
 * ``row`` is None where there is no next one.
 *
 * ``index`` is its place in the list that the request describes, that of its step or of all; -1 if it is not in it.
 */
export interface Located {
  row: Row | null;
  index: number;
}

/** What is to blame. ``step`` indexes the stepper; ``row`` is -1 for none. ``expected``, ``mark``: as in `Row`. */
export interface FindingView {
  path: string;
  op: string;
  step: number;
  cause: string;
  evidence: string;
  row: number;
  expected: string;
  mark: number;
}

/** What was marked as expected. ``text``: which tensors, in words; ``rows``: how many of the mismatches. */
export interface Mark {
  text: string;
  comment: string;
  rows: number;
}

/**
 * ``lines``: what came out. ``summary``: that in sentences, of a report. ``notes``: how far to trust it, and what made the runs.
 *
 * ``marks``: what is expected; ``kept``: the file that they are kept in, "" for none.
 */
export interface Overview {
  kind: 'run' | 'report';
  title: string;
  golden: string;
  mine: string;
  verdict: Verdict | null;
  lines: string[];
  summary: string;
  notes: string[];
  steps: Step[];
  findings: FindingView[];
  marks: Mark[];
  kept: string;
  first_bad: number;
  rows: number;
}

/**
 * ``script``: what calls it again, "" for none, then ``why`` says why not. ``save``: the line of Python that writes it.
 *
 * ``source``: where in the program it was called, "" if that was not recorded. ``kernel``, ``code``: of compiled code, the kernel that computes
 * it, and its code; "" for none.
 */
export interface FindingDetail {
  script: string;
  why: string;
  save: string;
  source: string;
  kernel: string;
  code: string;
}

/** A row of the map of layers. ``node``: its place in the tree; -1 is what lies around the layers. */
export interface Layer {
  path: string;
  type: string;
  node: number;
}

/**
 * The worst row of each layer (in execution order) at each step (all of the stepper), layer by layer in four buffers.
 *
 * Error and limit (little-endian float32, NaN: no figure), id of the row (int32, -1: nothing was recorded), and verdict
 * (uint8: 0 nothing recorded, 1 unmatched, 2 match, 3 within noise, 4 expected, 5 diverged).
 */
export interface LayerMap {
  layers: Layer[];
  steps: number;
}

export interface Element {
  index: number[];
  golden: Num;
  mine: Num;
  difference: Num;
}

/** The elements that differ most, the worst first; NaN on one side only is worst. ``differing``: how many there are. */
export interface Worst {
  elements: Element[];
  differing: number;
}

export interface Axis {
  name: string;
  size: number;
}

/** A kernel of compiled code. ``nodes``: of the graph, that it computes. ``code``: "" for one of PyTorch's. */
export interface KernelView {
  name: string;
  nodes: string[];
  code: string;
}

/**
 * One side of a row. ``kept`` says that values can be asked for; ``why`` says why not, ``part`` of what ("": all of it).
 *
 * ``call_id``: the execution id of its call, "" where there is none. ``axes``: of what was kept. ``code``: what gives this tensor in a cell. ``kernel``: of compiled code, the one that writes or reads it.
 */
export interface Side {
  which: Which;
  call_id: string;
  kept: boolean;
  why: string;
  part: string;
  dtype: string;
  shape: number[];
  axes: Axis[];
  device: string;
  min: Num;
  max: Num;
  mean: Num;
  l2norm: Num;
  nan: number | null;
  inf: number | null;
  zero: number | null;
  numel: number;
  fingerprint: string;
  code: string;
  kernel: KernelView | null;
}

export interface Metric {
  name: string;
  value: Num;
}

export interface Link {
  row: number;
  label: string;
}

/**
 * Neighbours of a record in the dataflow, the first of ``total``.
 *
 * ``inputs``/``outputs``: of the same call. ``consumers`` take this tensor, ``siblings`` take the one that it is, too.
 */
export interface Flow {
  relation: Relation;
  links: Link[];
  total: number;
}

export interface Detail {
  row: Row;
  sides: Side[];
  metrics: Metric[];
  producer: number;
  producer_label: string;
  flow: Flow[];
}

/**
 * A window of a 2-d slice as ``h * w`` little-endian float32 in the one buffer.
 *
 * ``y0 .. x1``: the window in elements, end exclusive; each cell covers ``fy * fx`` elements and
 * shows the one of largest magnitude (a NaN wins), so that one outlier stays visible.
 */
export interface View {
  h: number;
  w: number;
  fy: number;
  fx: number;
  y0: number;
  x0: number;
  y1: number;
  x1: number;
  rows: number;
  cols: number;
  lo: Num;
  hi: Num;
}

/**
 * The same 2-d slice at ``count`` indices of an axis from ``first`` on, of ``total``, as ``count * h * w`` little-endian float32
 * in the one buffer; cells as in `View`.
 */
export interface Heads {
  h: number;
  w: number;
  first: number;
  count: number;
  total: number;
  lo: Num;
  hi: Num;
}

/** Counts of the finite elements of the whole tensor in equal bins from ``lo`` to ``hi``. */
export interface Histogram {
  lo: Num;
  hi: Num;
  counts: number[];
  nan: number;
  inf: number;
  total: number;
}

/**
 * How many elements differ by how much: counts of log10 of the absolute difference, in equal bins from ``lo`` to ``hi``.
 *
 * ``same``: elements that do not differ; ``broken``: those that are not finite on one side or both, and not the same. ``limit``: what the tensor's limit would be
 * for each element, were the error spread evenly; None where it is none of the whole.
 */
export interface ErrorHistogram {
  lo: Num;
  hi: Num;
  counts: number[];
  same: number;
  broken: number;
  total: number;
  limit: Num;
}

/**
 * Golden against mine, both axes from ``lo`` to ``hi``. ``size`` 0: two buffers of ``count`` little-endian float32, golden's and mine's values.
 *
 * Else one buffer of ``size * size`` little-endian uint32: how many elements lie in each cell, golden along a row, mine's lowest row first.
 * ``broken``: elements that are not finite on both sides.
 */
export interface Scatter {
  lo: Num;
  hi: Num;
  size: number;
  count: number;
  broken: number;
}

/** ``step`` indexes the stepper; ``value`` is None where there is no figure. */
export interface Point {
  step: number;
  row: number;
  value: Num;
}

/** A figure of one site over all steps. Of many steps a point stands for several, and is the largest of them. */
export interface Line {
  figure: string;
  points: Point[];
}

export interface Series {
  lines: Line[];
}

/**
 * What an explorer shows. ``position``: index of the stepper; ``selected``: a row, -1 for none; ``path``, ``mismatch``, ``text``:
 * what the list is narrowed to. ``which``, ``axes``, ``fixed``: what of the tensor; no ``axes`` means its last two.
 */
export interface State {
  position: number;
  selected: number;
  path: string;
  mismatch: boolean;
  text: string;
  which: Tab;
  axes: number[];
  fixed: number[];
}

export interface Exported {
  path: string;
}

/** An answer that was given when a page was saved. ``key``: what was asked, see `saved_page.py`; ``buffers``: as base64. */
export interface Kept {
  key: string;
  answer: Record<string, unknown>;
  buffers: string[];
}

/** What a saved page answers from. ``parents``: of ``nodes``; ``homes``: the node of each of ``rows``, -1 for none. */
export interface SavedPage {
  state: State;
  snapshot: Overview;
  nodes: TreeNode[];
  parents: number[];
  rows: Row[];
  homes: number[];
  answers: Kept[];
}

export interface OverviewRequest {
  op: 'overview';
}

/** ``parent`` -1 asks for the roots. */
export interface ChildrenRequest {
  op: 'children';
  parent: number;
  start: number;
  n: number;
}

/**
 * What a list is narrowed to, and its order.
 *
 * ``node`` -1 means all; ``mismatch`` keeps diverged and unmatched rows only; ``text``: see `filters.py`; ``every``: of all steps at once.
 * ``sort``: a column, "" for execution order, which a run always has.
 */
export interface Listed {
  node: number;
  mismatch: boolean;
  text: string;
  every: boolean;
  sort: Sort;
  descending: boolean;
}

/** ``step`` -1 means all. */
export interface RowsRequest {
  node: number;
  mismatch: boolean;
  text: string;
  every: boolean;
  sort: Sort;
  descending: boolean;
  op: 'rows';
  step: number;
  start: number;
  n: number;
}

/**
 * The next (``delta`` 1) or previous (-1) row, in execution order over all steps; of a sorted list, in that of the row's step.
 *
 * ``row`` -1 starts before the first row, or behind the last one.
 */
export interface LocateRequest {
  node: number;
  mismatch: boolean;
  text: string;
  every: boolean;
  sort: Sort;
  descending: boolean;
  op: 'locate';
  row: number;
  delta: number;
}

/** Like `locate`, for the row itself: where is it? */
export interface RowRequest {
  node: number;
  mismatch: boolean;
  text: string;
  every: boolean;
  sort: Sort;
  descending: boolean;
  op: 'row';
  row: number;
}

/** The ids of the tree nodes from a root down to the one at ``path`` (its nearest one above). */
export interface PathRequest {
  op: 'path';
  path: string;
}

export interface PathAnswer {
  ids: number[];
}

export interface DetailRequest {
  op: 'detail';
  row: number;
}

/**
 * ``axes``: row and column axis (-1: none, for fewer than two); ``fixed``: index per axis, ignored for those two.
 *
 * ``y1``/``x1`` of 0 mean up to the end; ``size``: cells per side at most.
 */
export interface ViewRequest {
  op: 'view';
  row: number;
  which: Which;
  axes: number[];
  fixed: number[];
  y0: number;
  x0: number;
  y1: number;
  x1: number;
  size: number;
}

/** ``axis``: that of the heads, ``first``: the first one; ``axes``, ``fixed``, ``size`` as in `ViewRequest`. */
export interface HeadsRequest {
  op: 'heads';
  row: number;
  which: Which;
  axis: number;
  first: number;
  axes: number[];
  fixed: number[];
  size: number;
}

export interface HistogramRequest {
  op: 'histogram';
  row: number;
  which: Which;
  bins: number;
}

export interface ErrorsRequest {
  op: 'errors';
  row: number;
  bins: number;
}

/** ``points``: so many at most as points; ``size``: cells per side beyond that. */
export interface ScatterRequest {
  op: 'scatter';
  row: number;
  points: number;
  size: number;
}

/** ``n``: points of a line at most. */
export interface SeriesRequest {
  op: 'series';
  row: number;
  n: number;
}

/** ``finding`` is its place in the overview's list. */
export interface FindingRequest {
  op: 'finding';
  finding: number;
}

export interface LayersRequest {
  op: 'layers';
}

export interface WorstRequest {
  op: 'worst';
  row: number;
  n: number;
}

/** Mark a row (``finding`` -1) or a finding (``row`` -1) as expected. ``scope``: of a row, that tensor in all steps or in its own, or all that its module makes. */
export interface ExpectRequest {
  op: 'expect';
  row: number;
  finding: number;
  scope: Scope;
  comment: string;
}

/** ``mark``: its place in the overview's list; ``text``: as it is there. */
export interface UnexpectRequest {
  op: 'unexpect';
  mark: number;
  text: string;
}

/** Write what is shown to a file beside the notebook: a page, or a figure. */
export interface ExportRequest {
  position: number;
  selected: number;
  path: string;
  mismatch: boolean;
  text: string;
  which: Tab;
  axes: number[];
  fixed: number[];
  op: 'export';
  kind: 'html' | 'svg' | 'png';
}

/** What each op asks and answers. */
export interface Ops {
  overview: { request: OverviewRequest; answer: Overview };
  children: { request: ChildrenRequest; answer: Children };
  rows: { request: RowsRequest; answer: Page };
  locate: { request: LocateRequest; answer: Located };
  row: { request: RowRequest; answer: Located };
  path: { request: PathRequest; answer: PathAnswer };
  detail: { request: DetailRequest; answer: Detail };
  view: { request: ViewRequest; answer: View };
  heads: { request: HeadsRequest; answer: Heads };
  histogram: { request: HistogramRequest; answer: Histogram };
  series: { request: SeriesRequest; answer: Series };
  finding: { request: FindingRequest; answer: FindingDetail };
  layers: { request: LayersRequest; answer: LayerMap };
  worst: { request: WorstRequest; answer: Worst };
  errors: { request: ErrorsRequest; answer: ErrorHistogram };
  scatter: { request: ScatterRequest; answer: Scatter };
  expect: { request: ExpectRequest; answer: Overview };
  unexpect: { request: UnexpectRequest; answer: Overview };
  export: { request: ExportRequest; answer: Exported };
}
