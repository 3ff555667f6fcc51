/** Every text of the page that does not come from the kernel. */
import type { Relation, Scope, Verdict, Which } from './wire';

export const VERDICTS: Record<Verdict, { mark: string; text: string }> = {
  match: { mark: '✓', text: 'match' },
  within_noise: { mark: '≈', text: 'within noise' },
  expected: { mark: '☑', text: 'expected' },
  diverged: { mark: '✗', text: 'diverged' },
  unmatched: { mark: '?', text: 'unmatched' },
  nondeterministic: { mark: '~', text: 'nondeterministic' },
};

/** Of a cell of the map of layers. */
export const STATES = [
  'nothing recorded',
  'unmatched',
  'match',
  'within noise',
  'expected',
  'diverged',
];

export const SIDES: Record<Which, string> = {
  golden: 'golden',
  mine: 'mine',
  difference: 'difference',
};

/** What of a row is marked as expected. */
export const SCOPES: Record<Scope, string> = {
  tensor: 'this tensor, in all steps',
  step: 'this tensor, in this step',
  module: 'all that this module makes',
};

export const RELATIONS: Record<Relation, string> = {
  inputs: 'made from',
  outputs: 'makes',
  consumers: 'taken by',
  siblings: 'also taken by',
};

export const T = {
  explorer: 'Tensor explorer',
  findings: (n: number) => (n === 1 ? '1 finding' : `${n} findings`),
  findingStep: (label: string) => `step ${label}`,
  firstBad: 'First mismatch',
  details: 'Details',
  cause: 'cause',
  where: 'where',
  evidence: 'evidence',
  inShort: 'in short',
  others: 'Other candidates',
  calledAt: 'called at',
  computedBy: 'computed by kernel',
  copyKernel: 'Copy the code of the kernel',
  kernelCode: 'Code of the kernel',
  script: 'Repro script',
  copyScript: 'Copy script',
  copyLine: 'Copy line',
  noScript: (why: string) => `no repro script: ${why}`,

  expect: 'Mark as expected',
  expectHint: 'This difference is known and wanted: say why, and it is quiet from now on (e)',
  comment: 'why it is expected',
  scope: 'what is expected',
  mark: 'Mark',
  cancel: 'Cancel',
  markedNow: 'marked as expected; all is judged anew',
  unmarkedNow: 'no longer expected; all is judged anew',
  unmark: (text: string, rows: number) =>
    `No longer expect ${text} (${count(rows, 'mismatch', 'mismatches')})`,
  unmarkFace: 'Unmark',
  marked: (n: number) => `${count(n, 'mark')} of what is expected`,
  markedRows: (n: number) =>
    n ? count(n, 'mismatch', 'mismatches') : 'nothing like it differs now',
  keptIn: (file: string) => `kept in ${file}`,
  keptNowhere: 'kept in this report alone: the run is in no folder',
  nothingToMark: 'only a mismatch can be marked as expected',

  layers: 'Layers and tokens',
  layerMap: 'Error over limit, layer by token',
  layerMarks: '✗ diverged · frame: unmatched · blank: nothing recorded',
  growth: 'Error along depth',
  growthMarks: 'bold: the step in view · dashed: its limits · ✗ diverged',
  mapHint: 'a click goes there; in the map, arrow keys and Enter do',
  around: '(around the layers)',
  beyond: (times: string) => `, ${times} × the limit`,
  limits: (times: string) => `${times} × limit`,
  divergedLayers: (n: number, first: string) =>
    n ? `${count(n, 'layer')} diverged, first ${first}` : 'no layer diverged',

  stepper: 'Token stepper',
  previousStep: 'Previous token (←)',
  nextStep: 'Next token (→)',
  playTokens: 'Play tokens',
  playFace: 'play',
  play: 'Play token by token',
  pause: 'Pause (any key or click does)',
  noSteps: 'no steps recorded',
  fed: (text: string) => `“${text}”`,
  stepTitle: (kind: string, rows: number, bad: number) =>
    `${kind}, ${count(rows, 'record')}${bad ? `, ${bad} diverged` : ''}`,

  tree: 'Model tree',
  more: (n: number) => `${n.toLocaleString('en')} more…`,
  bad: (n: number) => `${n.toLocaleString('en')} diverged`,
  unmatched: (n: number) => `${n.toLocaleString('en')} unmatched`,
  nothingRecorded: 'nothing recorded here',

  records: 'Records',
  filter: 'Filter records',
  filterHint: 'filter: path, op, nan, >1e3…',
  filterHelp: `Words of path, role, op or dtype; nan or inf: the tensor holds one; >1e3: its maximum is greater; <1e-3: its minimum is less;
abs>1e3, abs<1e-3: its largest magnitude is; mean and l2norm likewise. Of a pair, one side must pass. A tensor with a NaN has no such figure. id:3_1: of the call with this execution id, or of one in it.`,
  mismatches: 'mismatches only',
  every: 'all tokens',
  everyHint: 'List the records of all tokens at once',
  sortBy: (name: string) => `Sort by ${name}; a third time: execution order`,
  under: (path: string) => `under ${path}`,
  clearNode: 'Show the whole model again',
  count: (n: number) => count(n, 'record'),
  noRecords: 'no record here passes the filters',
  kept: 'values are kept',
  notKept: 'summary only: values were not kept',
  root: '(root)',
  columns: {
    seq: '#',
    step: 'token',
    path: 'tensor',
    op: 'op',
    dtype: 'type',
    shape: 'shape',
    min: 'min',
    max: 'max',
    mean: 'mean',
    l2norm: 'l2 norm',
    error: 'error',
    limit: 'limit',
    verdict: 'verdict',
  },
  previousRecord: 'Previous record (p)',
  nextRecord: 'Next record (n)',
  previousMismatch: 'Previous mismatch (P)',
  nextMismatch: 'Next mismatch (N)',
  noFurther: (mismatch: boolean) =>
    mismatch ? 'no further mismatch in this direction' : 'no further record in this direction',
  runHasNoMismatch: 'a single run has no mismatches: compare it with another one',

  panel: 'Tensor',
  kernel: 'kernel',
  kernelNodes: (n: number) => `computes ${count(n, 'node')}:`,
  noKernelCode: 'one of PyTorch’s own: it has no code here',
  chooseRow: 'Select a record to see its tensor.',
  keys: 'n / p  next and previous record · N / P  next and previous mismatch · e  mark as expected · ← →  token, in the token bar',
  unreadable: 'can’t be read: see below',
  showInTree: 'Show this module in the tree',
  callId: (id: string) => (id ? ` · id ${id}` : ''),
  place: (seq: number, step: string, call: number) =>
    `#${seq} · ${step}${call ? ` · call ${call}` : ''}`,
  errorLimit: (error: string, limit: string) => `error ${error}, limit ${limit}`,
  part: (part: string) => `only ${part} was kept; the figures are those of the whole tensor`,
  producer: 'produced by',
  moreLinks: (n: number) => `and ${n.toLocaleString('en')} more`,
  overSteps: (figure: string) => `${figure} over all steps`,
  sparklineHint: 'a click or an arrow key goes to this tensor at another step',
  sides: 'Which tensor',
  sideBySide: 'side by side',
  linkedHint: 'point at an element to see its three values',
  worst: (n: number, differing: number) =>
    `Worst elements: ${n.toLocaleString('en')} of ${differing.toLocaleString('en')} that differ`,
  errors: 'Size of the differences',
  errorScale: '|mine − golden|, log scale',
  differ: (n: number, total: number) =>
    `${n.toLocaleString('en')} of ${count(total, 'element')} differ`,
  brokenPairs: (n: number) => `${n.toLocaleString('en')} with NaN or inf`,
  limitEach: (limit: string) => `dashed: the limit, spread evenly (${limit})`,
  scatter: 'Golden against mine',
  scatterAxes: 'golden → · mine ↑',
  scatterHint: 'on the line, both are equal',
  scatterSays: (n: number, lo: string, hi: string) => `${count(n, 'element')} from ${lo} to ${hi}`,
  elements: (n: number) => count(n, 'element'),
  element: 'index',
  showElement: 'Show this element in the heat map',
  summary: 'Summary',
  metrics: 'Metrics',
  code: 'Code',
  copy: 'Copy as code',
  copied: 'copied',
  notCopied: 'the browser does not let the page copy: select the line and copy it',

  rowAxis: 'rows',
  columnAxis: 'columns',
  axes: 'Slice',
  axisIndex: (name: string) => `Index on axis ${name}`,
  heads: (name: string) => `${name} by ${name}`,
  headsShown: (first: number, n: number, total: number) =>
    n < total ? `${first} to ${first + n - 1} of ${total}, in one scale` : `${n}, in one scale`,
  previousHeads: 'Previous ones',
  nextHeads: 'Next ones',
  heatmap: (rows: number, cols: number) => `Heat map of a ${rows} by ${cols} slice`,
  window: (y0: number, y1: number, x0: number, x1: number) =>
    `rows ${y0}–${y1 - 1}, columns ${x0}–${x1 - 1}`,
  windowFlat: (x0: number, x1: number) => `elements ${x0}–${x1 - 1}`,
  scalar: 'scalar',
  cells: (fy: number, fx: number) =>
    fy * fx > 1 ? `, a cell is the extreme of ${fy} × ${fx}` : '',
  hint: 'wheel or + − zoom, drag or arrows pan, 0 resets, click shows a value',
  empty: 'This tensor has no elements.',
  nan: 'NaN',
  histogram: 'Histogram',
  log: 'log scale',
  bins: (n: number, lo: string, hi: string) => `${n} bins from ${lo} to ${hi}`,
  bin: (lo: string, hi: string, n: number) => `${lo} … ${hi}: ${n.toLocaleString('en')}`,
  finite: (n: number) => `${n.toLocaleString('en')} finite`,

  save: 'Save what is shown',
  saveFace: 'save',
  kinds: { html: 'HTML', svg: 'SVG', png: 'PNG' },
  saveAs: {
    html: 'Save this explorer as a page of its own, beside the notebook',
    svg: 'Save what is shown as a figure (SVG), beside the notebook',
    png: 'Save what is shown as a figure (PNG), beside the notebook',
  },
  saved: (path: string) => `saved: ${path}`,
  notInPage: 'not in this page: open the run in a notebook for that',
  wordsOnly: 'in a saved page, the filter takes words only',
  unpackable: (why: string) => `This browser can't unpack the page (${why}).`,

  busy: 'kernel busy…',
  dead: 'no answer: a cell is running, or the kernel is gone (then run this cell again)',
  gone: 'the kernel was restarted or shut down: run this cell again',
  badMessage: (text: string) => `the kernel could not read a message: ${text}`,
};

function count(n: number, noun: string, nouns = `${noun}s`): string {
  return `${n.toLocaleString('en')} ${n === 1 ? noun : nouns}`;
}
