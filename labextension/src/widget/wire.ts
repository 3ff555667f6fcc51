// Generated from llmdebug_nb/show/row_columns.py and llmdebug_nb/show/wire.py and llmdebug_nb/show/wire_findings.py and llmdebug_nb/show/wire_halts.py and llmdebug_nb/show/wire_layers.py and llmdebug_nb/show/wire_requests.py by `python labextension/wire_types.py`. Do not edit.

export type Num = number | string | null;
export type Verdict = 'match' | 'within_noise' | 'expected' | 'diverged' | 'unmatched' | 'nondeterministic' | 'incomparable';
export type When = 'always' | 'run' | 'report' | 'every' | 'ranked';
export type ColumnName = 'step' | 'rank' | 'seq' | 'path' | 'op' | 'dtype' | 'shape' | 'min' | 'max' | 'mean' | 'l2norm' | 'error' | 'limit' | 'which' | 'verdict';
export type Sort = '' | 'step' | 'rank' | 'seq' | 'path' | 'op' | 'dtype' | 'shape' | 'error' | 'limit' | 'which' | 'verdict';
export type Which = 'golden' | 'mine' | 'difference';
export type Tab = 'golden' | 'mine' | 'difference' | 'all';
export type Relation = 'inputs' | 'outputs' | 'consumers' | 'siblings';
export type Scope = 'tensor' | 'step' | 'module';
export type LineState = 'equal' | 'rewritten' | 'guilty' | 'inherited';

/**
 * A record of a run, or a pair of a report. ``step`` indexes the stepper.
 *
 * ``differing``: which tokens, or other rows, of a tensor that diverged differ; "" for none;
 * ``which``: their numbers.
 * ``expected``: the comment on an expected row, "" for another. ``mark``: the index of its
 * expectation in the overview's list; -1 if no expectation names the row.
 */
export interface Row {
  id: number;
  step: number;
  rank: number;
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
  which: string;
  differing: string;
  reason: string;
  expected: string;
  mark: number;
}

/**
 * A column of the explorer's list.
 *
 * ``number``: it is aligned to the right. ``figure``: the first click sorts it from the largest.
 */
export interface ListColumn {
  name: ColumnName;
  title: string;
  width: number;
  when: When;
  number: boolean;
  figure: boolean;
  searched: boolean;
}

export const LIST_COLUMNS: ListColumn[] = [
  {"name": "step", "title": "token", "width": 78, "when": "every", "number": false, "figure": false, "searched": false},
  {"name": "rank", "title": "rank", "width": 40, "when": "ranked", "number": true, "figure": false, "searched": false},
  {"name": "seq", "title": "#", "width": 46, "when": "always", "number": true, "figure": false, "searched": false},
  {"name": "path", "title": "tensor", "width": 0, "when": "always", "number": false, "figure": false, "searched": false},
  {"name": "op", "title": "op", "width": 70, "when": "always", "number": false, "figure": false, "searched": true},
  {"name": "dtype", "title": "type", "width": 42, "when": "always", "number": false, "figure": false, "searched": true},
  {"name": "shape", "title": "shape", "width": 84, "when": "always", "number": false, "figure": false, "searched": false},
  {"name": "min", "title": "min", "width": 60, "when": "run", "number": true, "figure": true, "searched": false},
  {"name": "max", "title": "max", "width": 60, "when": "run", "number": true, "figure": true, "searched": false},
  {"name": "mean", "title": "mean", "width": 60, "when": "run", "number": true, "figure": true, "searched": false},
  {"name": "l2norm", "title": "l2 norm", "width": 60, "when": "run", "number": true, "figure": true, "searched": false},
  {"name": "error", "title": "error", "width": 60, "when": "report", "number": true, "figure": true, "searched": false},
  {"name": "limit", "title": "limit", "width": 60, "when": "report", "number": true, "figure": true, "searched": false},
  {"name": "which", "title": "which", "width": 60, "when": "report", "number": false, "figure": false, "searched": false},
  {"name": "verdict", "title": "verdict", "width": 124, "when": "report", "number": false, "figure": false, "searched": true},
];

/** The rows of one request in a step of an engine, and their positions in its tokens. */
export interface RequestRows {
  name: string;
  row: number;
  last_row: number;
  position: number;
  last_position: number;
}

/**
 * One step of the token stepper. ``label`` is ready to show: ``0 prefill``.
 *
 * ``text``: the step's input tokens as text, "" if not known. ``requests``: of an engine, in the
 * order of their rows.
 */
export interface Step {
  index: number;
  generation: number;
  step: number;
  kind: string;
  label: string;
  text: string;
  requests: RequestRows[];
  rows: number;
  bad: number;
}

/**
 * A module. ``rows``: its records and those below it, over all steps.
 *
 * ``bad``, ``unmatched``, ``expected``: how many of them diverged, have no partner, are expected.
 * ``verdict``: the worst of the rows that were compared; None in a run.
 * ``note``: the module's other names, and the comments on its expected rows.
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

/** A page of the list. ``problem``: why the filter can't be read, "" if it can. */
export interface Page {
  total: number;
  start: number;
  rows: Row[];
  problem: string;
}

/**
 * A row and its place in the list. ``row`` is None if there is no next one.
 *
 * ``index``: the place in the requested list, of the row's step or of all; -1 if not listed.
 */
export interface Located {
  row: Row | null;
  index: number;
}

/**
 * A finding. ``step`` indexes the stepper; ``row`` is -1 for none.
 *
 * ``head``, ``place``, ``where``, ``what``, ``which``, ``why``, ``do``: see `Headline` in
 * `findings.headline`.
 * ``file``, ``line``: to open, "" and 0 if unknown, or if torch's own. ``proof``: what a proof
 * said, "" without one. ``expected``, ``mark``: as in `Row`.
 */
export interface FindingView {
  path: string;
  op: string;
  step: number;
  cause: string;
  evidence: string;
  row: number;
  head: string;
  place: string;
  where: string;
  what: string;
  which: string;
  why: string;
  do: string;
  file: string;
  line: number;
  proof: string;
  expected: string;
  mark: number;
}

/** An expectation. ``text``: its tensors in words; ``rows``: how many mismatches it covers. */
export interface Mark {
  text: string;
  comment: string;
  rows: number;
}

/**
 * The result. ``lines``: the figures. ``summary``: a report's result in sentences.
 *
 * ``caution``: what a good verdict must not hide, "" for nothing.
 * ``notes``: the limits of the result, and the versions that recorded the runs.
 * ``inside``: it is the comparison of a blamed module, recorded again with its operators.
 * ``halt``: the number of the halt that it shows, from 1; 0: no program is stepped through.
 * ``marks``: the expectations; ``kept``: the file they are kept in, "" for none.
 * ``ranks``: those that the rows are of, if there are several.
 */
export interface Overview {
  kind: 'run' | 'report';
  title: string;
  golden: string;
  mine: string;
  verdict: Verdict | null;
  caution: string;
  lines: string[];
  summary: string;
  notes: string[];
  steps: Step[];
  findings: FindingView[];
  marks: Mark[];
  kept: string;
  first_bad: number;
  rows: number;
  ranks: number[];
  inside: boolean;
  halt: number;
}

export interface Element {
  index: number[];
  golden: Num;
  mine: Num;
  difference: Num;
}

/**
 * The elements that differ most, the worst first; NaN on one side is worst.
 *
 * ``differing``: how many elements differ.
 */
export interface Worst {
  elements: Element[];
  differing: number;
}

export interface Axis {
  name: string;
  size: number;
}

/**
 * A kernel of compiled code. ``nodes``: the graph nodes that it computes.
 *
 * ``code``: its source, "" for a kernel of PyTorch.
 */
export interface KernelView {
  name: string;
  nodes: string[];
  code: string;
}

/**
 * One side of a row. ``kept``: its values were recorded; if not, ``why`` says why.
 *
 * ``part``: which part of the tensor was kept, "" for all. ``axes``: those of the kept values.
 * ``call_id``: the execution id of its call, "" for none. ``code``: the Python expression of the
 * tensor. ``kernel``: for compiled code the kernel that writes or reads it.
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
 * ``inputs``, ``outputs``: of the same call. ``consumers``: inputs that are this tensor.
 * ``siblings``: other inputs that are the same tensor as this input.
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
 * A window of a 2-d slice as ``h * w`` little-endian float32 in one buffer.
 *
 * ``y0 .. x1``: the window in elements, end exclusive. Each cell covers ``fy * fx`` elements and
 * shows the one of largest magnitude (a NaN wins), which keeps an outlier visible.
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
 * The same 2-d slice at ``count`` of ``total`` indices of an axis, from ``first`` on.
 *
 * One buffer of ``count * h * w`` little-endian float32; cells as in `View`.
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

/** Counts of the tensor's finite elements in equal bins from ``lo`` to ``hi``. */
export interface Histogram {
  lo: Num;
  hi: Num;
  counts: number[];
  nan: number;
  inf: number;
  total: number;
}

/**
 * Counts of log10 of the absolute differences, in equal bins from ``lo`` to ``hi``.
 *
 * ``same``: elements that don't differ; ``broken``: different ones that are not finite on one side
 * or both. ``limit``: the tensor's limit per element if its error were spread evenly; None if the
 * tensor's limit is not one of the relative L2 error.
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
 * Golden against mine, both axes from ``lo`` to ``hi``.
 *
 * With ``size`` 0, two buffers of ``count`` little-endian float32: golden's and mine's values.
 * Else one buffer of ``size * size`` little-endian uint32: the number of elements in each cell,
 * golden along a row, mine's lowest row first. ``broken``: elements that are not finite on both
 * sides.
 */
export interface Scatter {
  lo: Num;
  hi: Num;
  size: number;
  count: number;
  broken: number;
}

/** A point of a curve. ``step`` indexes the stepper; ``value`` is None without a figure. */
export interface Point {
  step: number;
  row: number;
  value: Num;
}

/** A figure of one tensor over all steps; of many steps, a point is the largest of several. */
export interface Line {
  figure: string;
  points: Point[];
}

export interface Series {
  lines: Line[];
}

/**
 * The state of an explorer. ``position``: index of the stepper; ``selected``: a row or -1.
 *
 * ``path``, ``mismatch``, ``text``: the filter of the list. ``which``, ``axes``, ``fixed``: the
 * side and the slice of the tensor; without ``axes`` its last two.
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

/** An answer in a saved page. ``key``: the request, see `saved_page.py`; ``buffers``: base64. */
export interface Kept {
  key: string;
  answer: Record<string, unknown>;
  buffers: string[];
}

/** The data of a saved page. ``parents``: of ``nodes``; ``homes``: each row's node or -1. */
export interface SavedPage {
  state: State;
  snapshot: Overview;
  nodes: TreeNode[];
  parents: number[];
  rows: Row[];
  homes: number[];
  answers: Kept[];
}

/**
 * The line of one program that makes a call. ``place``: ``file:line function``, or why none.
 *
 * ``call``: path and operator; "" if the program makes no such call. ``code``: the text of the
 * line. ``frames``: the lines that called it, innermost first, up to the module's forward.
 */
export interface SourceView {
  which: Which;
  place: string;
  call: string;
  code: string;
  frames: string[];
}

/** A line of golden and that of mine that answers to it; "" for none. ``error``: relative L2. */
export interface LinePairView {
  state: LineState;
  golden: string;
  mine: string;
  error: Num;
}

/**
 * A line of golden beside the line of mine that answers to it.
 *
 * Line numbers: 0, that side has no line here. ``state``: "" where nothing was recorded on the
 * line; ``halted``: a program is halted here. ``error``: relative L2 of its result.
 */
export interface CodeLine {
  golden_line: number;
  golden: string;
  mine_line: number;
  mine: string;
  state: LineState | 'halted' | '';
  error: Num;
}

/**
 * Golden's function beside mine's.
 *
 * ``at``: the index of the line to blame, -1 for none. ``note``: why there is no code, or what is
 * left out; "" for nothing.
 */
export interface CodeView {
  golden_file: string;
  golden_function: string;
  mine_file: string;
  mine_function: string;
  lines: CodeLine[];
  at: number;
  note: string;
}

/**
 * The details of a finding. ``script`` replays the call; "" for none, and ``why`` says why.
 *
 * ``save``: the line of Python that writes the script. ``relation``: what mine's value is, of
 * golden's; ``advice``: what to do; both may be "". ``sources``: golden's and mine's, or none.
 * ``pairs``: the lines around them. ``listing``: their functions side by side. ``kernel``,
 * ``code``: for compiled code the kernel that computes the call, and its source; "" for none.
 */
export interface FindingDetail {
  script: string;
  why: string;
  save: string;
  relation: string;
  advice: string;
  sources: SourceView[];
  pairs: LinePairView[];
  listing: CodeView;
  kernel: string;
  code: string;
}

/** A way to go on. ``can``: it can be carried out here. */
export interface Command {
  name: string;
  effect: string;
  can: boolean;
}

/**
 * Where a program is halted, or was halted last before it ended.
 *
 * ``head``, ``place``, ``where``: as of a `Headline`. ``why``: the condition that held, or how the
 * program ended. ``tensors``: the outputs beside golden's in words. ``rest``: what agrees since
 * golden's values were put in; "" if none were. ``file``, ``line``: to open, "" and 0 if unknown.
 * ``listing``: the function that it is halted in; ``at``: the line.
 */
export interface HaltView {
  ended: boolean;
  head: string;
  place: string;
  where: string;
  why: string;
  tensors: string;
  rest: string;
  file: string;
  line: number;
  commands: Command[];
  listing: CodeView;
}

/** A row of the map of layers. ``node``: its place in the tree; -1: outside of all layers. */
export interface Layer {
  path: string;
  type: string;
  node: number;
}

/**
 * The worst row of each layer at each step of the stepper, layer by layer in six buffers.
 *
 * The layers are in execution order. The buffers: error and limit (little-endian float32, NaN: no
 * figure), id of the row (int32, -1: no record), state (uint8, see `CallCell`), the share of its
 * tokens that differ (float32, NaN: unknown), and which these are (int32, an index of
 * ``differing``).
 */
export interface LayerMap {
  layers: Layer[];
  steps: number;
  differing: string[];
}

/**
 * A call inside a layer, by its worst output. ``label``: its last name.
 *
 * ``state``: 0 no record, 1 unmatched, 2 rewritten, 3 match, 4 within noise, 5 expected,
 * 6 diverged by inheritance, 7 diverged where the error is made. ``differing``: which of its
 * tokens differ, "" for none.
 */
export interface CallCell {
  label: string;
  path: string;
  row: number;
  state: number;
  error: Num;
  limit: Num;
  differing: string;
}

/** The calls of a layer in a step, in execution order: the first of ``total``. */
export interface Calls {
  cells: CallCell[];
  total: number;
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
 * The filter and the order of a list.
 *
 * ``node`` -1 means all; ``mismatch``: only diverged and unmatched rows; ``text``: see
 * `filters.py`; ``every``: all steps at once. ``sort``: a column, "" for execution order, in which
 * the rows of a run always are.
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
 * The next (``delta`` 1) or previous (-1) row in execution order over all steps.
 *
 * In a sorted list it is the next one in that list, of the row's step. ``row`` -1 starts before
 * the first row, or after the last one.
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

/** Where in the list a row is. */
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

/** The ids of the tree nodes from a root down to ``path`` or its nearest ancestor. */
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
 * A window of a slice. ``axes``: row and column axis, -1 for none.
 *
 * ``fixed``: an index for each axis, ignored for those two. ``y1``, ``x1``: 0 means the end.
 * ``size``: cells per side at most.
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

/**
 * The slice at each index of ``axis`` from ``first`` on.
 *
 * ``axes``, ``fixed``, ``size``: as in `ViewRequest`.
 */
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

/** Golden against mine: up to ``points`` points, else ``size`` cells per side. */
export interface ScatterRequest {
  op: 'scatter';
  row: number;
  points: number;
  size: number;
}

/** The curves of a row, with at most ``n`` points each. */
export interface SeriesRequest {
  op: 'series';
  row: number;
  n: number;
}

/** The details of a finding, by its index in the overview's list. */
export interface FindingRequest {
  op: 'finding';
  finding: number;
}

export interface LayersRequest {
  op: 'layers';
}

/** The calls of a layer (an index of `LayerMap.layers`) in a step; ``n`` at most. */
export interface CallsRequest {
  op: 'calls';
  layer: number;
  step: number;
  n: number;
}

/** Put golden's value of a finding into mine's live model, run on, and compare. */
export interface ProveRequest {
  op: 'prove';
  finding: number;
}

/** Record a blamed module again with its operators; -1 goes back to the first comparison. */
export interface InsideRequest {
  op: 'inside';
  finding: number;
}

/** Where the program is halted. */
export interface HaltRequest {
  op: 'halt';
}

/** Let the halted program go on; the answer shows the next halt, or the end. */
export interface StepRequest {
  op: 'step';
  command: string;
}

export interface WorstRequest {
  op: 'worst';
  row: number;
  n: number;
}

/**
 * Mark a row (``finding`` -1) or a finding (``row`` -1) as expected.
 *
 * ``scope`` of a row: its tensor in all steps, in this step, or all outputs of its module.
 */
export interface ExpectRequest {
  op: 'expect';
  row: number;
  finding: number;
  scope: Scope;
  comment: string;
}

/** Remove an expectation: ``mark`` is its index in the overview's list, ``text`` its text. */
export interface UnexpectRequest {
  op: 'unexpect';
  mark: number;
  text: string;
}

/** Write the state to a file beside the notebook: a page or a figure. */
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
  calls: { request: CallsRequest; answer: Calls };
  prove: { request: ProveRequest; answer: Overview };
  inside: { request: InsideRequest; answer: Overview };
  halt: { request: HaltRequest; answer: HaltView };
  step: { request: StepRequest; answer: Overview };
  worst: { request: WorstRequest; answer: Worst };
  errors: { request: ErrorsRequest; answer: ErrorHistogram };
  scatter: { request: ScatterRequest; answer: Scatter };
  expect: { request: ExpectRequest; answer: Overview };
  unexpect: { request: UnexpectRequest; answer: Overview };
  export: { request: ExportRequest; answer: Exported };
}
