/** All texts that the explorer shows, except those that the kernel sends. */
import type { CodeLine, Relation, Scope, RequestRows, Verdict, Which } from './wire';

export const VERDICTS: Record<Verdict, { mark: string; text: string }> = {
  match: { mark: '✓', text: 'match' },
  within_noise: { mark: '≈', text: 'within noise' },
  expected: { mark: '☑', text: 'expected' },
  diverged: { mark: '✗', text: 'diverged' },
  unmatched: { mark: '?', text: 'unmatched' },
  nondeterministic: { mark: '~', text: 'nondeterministic' },
  incomparable: { mark: '≠', text: 'incomparable' },
};

/** States of a cell of the timeline, by the numbers that the kernel sends. */
export const STATES = [
  'nothing recorded',
  'unmatched',
  'written otherwise, equal in effect',
  'match',
  'within noise',
  'expected',
  'diverged, inherited',
  'diverged, made here',
];

export const SIDES: Record<Which, string> = {
  golden: 'golden',
  mine: 'mine',
  difference: 'difference',
};

/** How a line of mine answers to one of golden. */
export const LINES: Record<Exclude<CodeLine['state'], ''>, string> = {
  halted: 'the program is halted here',
  equal: '✓ equal',
  rewritten: '≈ rewritten',
  guilty: '✗ guilty',
  inherited: '↳ inherited',
};

/** Which tensors a mark covers. */
export const SCOPES: Record<Scope, string> = {
  tensor: 'this tensor, all steps',
  step: 'this tensor, this step only',
  module: 'every output of this module',
};

/** How other records relate to the selected one. */
export const RELATIONS: Record<Relation, string> = {
  inputs: 'computed from',
  outputs: 'used to compute',
  consumers: 'read by',
  siblings: 'also read by',
};

export const explorer = 'Tensor explorer';
export const findings = (n: number) => counted(n, 'finding');
export const noFindings = 'there is no finding';
export const expectedHead = (comment: string) => `Expected: ${comment}`;
export const what = 'what';
export const which = 'which';
export const why = 'why';
export const advice = 'do';
export const proof = 'proof';
export const outputs = 'outputs';
export const rest = 'rest';
export const open = 'Open line';
export const openTitle = 'Open the file or the cell at this line';
export const placeCopied = (place: string) => `copied: ${place} (no editor is at hand)`;
export const prove = 'Prove';
export const proveTitle = "Put golden's value in its place, run the model on, and compare";
export const inside = 'Look inside';
export const insideTitle = 'Record this module again with its operators, in both models';
export const back = 'Back';
export const backTitle = 'Show the first comparison again';
export const running = (what: string) => `${what}: the models run…`;
export const repro = 'Repro';
export const reproTitle = 'Show the script that replays the call';
export const moreFace = '⋯';
export const moreTitle = 'More: mark as expected, figures, notes';
export const code = 'Code';
export const golden = 'golden';
export const mine = 'mine';
export const noFile = 'its file is not known';
export const noCode = 'no line of code was recorded: record with mode="module+api"';
export const guiltyLine = 'the line to blame';
export const lineMarks: Record<Exclude<CodeLine['state'], ''>, string> = {
  halted: '◂',
  equal: '=',
  rewritten: '≡',
  guilty: '✗',
  inherited: '⤵',
};
export const calledAt = 'called at';
export const computedBy = 'computed by kernel';
export const copyKernel = 'Copy kernel code';
export const kernelCode = 'Kernel code';
export const script = 'Repro script';
export const copyScript = 'Copy script';
export const copyLine = 'Copy line';
export const noScript = (why: string) => `no repro script: ${why}`;

export const expect = 'Mark as expected';
export const expectHint =
  'Mark this difference as expected, with a reason. It no longer counts as diverged. (e)';
export const comment = 'reason';
export const scope = 'tensors to mark';
export const mark = 'Mark';
export const cancel = 'Cancel';
export const markedNow = 'marked as expected; verdicts updated';
export const unmarkedNow = 'mark removed; verdicts updated';
export const unmark = (text: string, rows: number) =>
  `Remove the mark on ${text} (${counted(rows, 'mismatch', 'mismatches')})`;
export const unmarkFace = 'Unmark';
export const marked = (n: number) => `Marked as expected: ${grouped(n)}`;
export const markedRows = (n: number) =>
  n ? counted(n, 'mismatch', 'mismatches') : 'matches no difference in this comparison';
export const keptIn = (file: string) => `saved in ${file}`;
export const keptNowhere = 'kept in this report only: the run has no folder';
export const nothingToMark = 'only a mismatch can be marked as expected';

export const timeline = 'Where the error goes';
export const timelineHint = 'execution order → · click or arrow keys and Enter · + − zoom';
export const legendHint = 'A cell is filled from below as far as its tokens differ';
export const legend = {
  right: 'right',
  made: 'made here',
  inherited: 'inherited',
  unmatched: 'unmatched',
  rewritten: 'rewritten',
};
export const strip = 'Calls of the layer, in execution order';
export const layer = (n: string) => `layer ${n}`;
export const firstOf = (n: number, total: number) => `(first ${grouped(n)} of ${grouped(total)})`;
export const around = '(outside the layers)';
export const beyond = (times: string) => `, ${times} × the limit`;
export const popOut = 'Pop out';
export const popOutTitle = 'Show this explorer in a tab, or on the whole screen';
export const noPopOut = 'this page may not fill the screen';
export const drawer = 'Records and model tree';

export const stepper = 'Token stepper';
export const previousStep = 'Previous token (←)';
export const nextStep = 'Next token (→)';
export const playTokens = 'Play tokens';
export const playFace = 'play';
export const play = 'Step through the tokens';
export const pause = 'Pause (any key or click)';
export const request = 'Request of the engine';
export const allRequests = 'all requests';
export const requests = (n: number) => counted(n, 'request');
const span = (first: number, last: number) => (first === last ? `${first}` : `${first}–${last}`);
export const positions = (of: RequestRows) => `at ${span(of.position, of.last_position)}`;
export const rowsOfRequest = (of: RequestRows) => {
  const positions = span(of.position, of.last_position);
  return `request ${of.name}: positions ${positions}, rows ${span(of.row, of.last_row)}`;
};
export const noSteps = 'no steps recorded';
export const fed = (text: string) => `“${text}”`;
export const stepTitle = (kind: string, rows: number, bad: number) =>
  `${kind}, ${counted(rows, 'record')}${bad ? `, ${bad} diverged` : ''}`;

export const tree = 'Model tree';
export const moreNodes = (n: number) => `${grouped(n)} more…`;
export const bad = (n: number) => `${grouped(n)} diverged`;
export const unmatched = (n: number) => `${grouped(n)} unmatched`;
export const nothingRecorded = 'nothing recorded here';

export const records = 'Records';
export const filter = 'Filter records';
export const filterHint = 'filter: path, op, nan, >1e3…';
export const filterHelp = [
  'Words: match path, role, op or dtype.',
  'nan, inf: the tensor contains one.',
  '>1e3: maximum above 1e3. <1e-3: minimum below 1e-3.',
  'abs>1e3, abs<1e-3: largest magnitude above or below. Likewise mean and l2norm.',
  'id:3_1: the call with this execution id, and the calls inside it.',
  'rank:1: recorded on rank 1. rank:0 rank:1: on one of them.',
  'A pair is listed if either side passes.',
  'A tensor with NaN values has no maximum, minimum, mean or norm.',
].join('\n');
export const rank = 'Rank';
export const everyRank = 'all ranks';
export const ofRank = (rank: number) => `rank ${rank}`;
export const mismatches = 'mismatches only';
export const every = 'all tokens';
export const everyHint = 'List the records of all tokens';
export const sortBy = (name: string) =>
  `Sort by ${name}. The third click restores execution order.`;
export const under = (path: string) => `in ${path}`;
export const clearNode = 'Show the whole model';
export const count = (n: number) => counted(n, 'record');
export const noRecords = 'no records pass the filter';
export const kept = 'values kept';
export const notKept = 'statistics only: values not kept';
export const root = '(root)';
export const previousRecord = 'Previous record (p)';
export const nextRecord = 'Next record (n)';
export const previousMismatch = 'Previous mismatch (P)';
export const nextMismatch = 'Next mismatch (N)';
export const noFurther = (mismatch: boolean, filtered: boolean) =>
  `no more ${mismatch ? 'mismatches' : 'records'} in this direction` +
  (filtered ? ' pass the filter' : '');
export const runHasNoMismatch = 'a single run has no mismatches: compare it with another one';

export const panel = 'Tensor';
export const kernel = 'kernel';
export const kernelNodes = (n: number) => `computes ${counted(n, 'node')}:`;
export const noKernelCode = 'a PyTorch kernel: its code is not recorded';
export const chooseRow = 'Select a record to see its tensor.';
export const keys = 'n / p: next or previous record · ?: all keys';
export const keysTitle = 'Keys';
export const close = 'Close';
const walkKeys: [string, string][] = [
  ['n p', 'next or previous record'],
  ['[ ]', 'previous or next token'],
];
const mapKeys: [string, string][] = [
  ['+ − 0', 'zoom a heat map; arrow keys pan'],
  ['Enter', 'the value of an element'],
  ['?', 'this list'],
];
export const runKeys: [string, string][] = [
  ...walkKeys,
  ['← →', 'token, in the token stepper'],
  ...mapKeys,
];
export const reportKeys: [string, string][] = [
  ['f', 'next finding'],
  ['c', 'to the code'],
  ['t', 'to the tensor'],
  ['N P', 'next or previous mismatch'],
  ...walkKeys,
  ['e', 'mark the record as expected'],
  ['← → ↑ ↓', 'layer and token, where the error goes; Enter selects'],
  ...mapKeys,
];
export const more = 'More: metrics, statistics, neighbours, code';
export const unreadable = 'cannot be read: see the message below';
export const showInTree = 'Show this module in the tree';
export const callId = (id: string) => (id ? ` · id ${id}` : '');
export const place = (seq: number, step: string, call: number) =>
  `#${seq} · ${step}${call ? ` · call ${call}` : ''}`;
export const differing = (where: string) => `differs at ${where}`;
export const differingHint = 'Their own error is beyond the limit. Numbers count from 0';
export const errorLimit = (error: string, limit: string) => `error ${error}, limit ${limit}`;
export const part = (part: string) =>
  `only ${part} was kept; the statistics describe the whole tensor`;
export const producer = 'produced by';
export const moreLinks = (n: number) => `and ${grouped(n)} more`;
export const overSteps = (figure: string) => `${figure} over all steps`;
export const sparklineHint = 'Click, or press an arrow key, to select this tensor at another step';
export const sides = 'Which tensor';
export const sideBySide = 'side by side';
export const linkedHint = 'Point at an element to see its value in all three.';
export const worst = (n: number, differing: number) =>
  `Worst elements: ${grouped(n)} of ${grouped(differing)} that differ`;
export const errors = 'Distribution of differences';
export const errorScale = '|mine − golden|, log scale';
export const differ = (n: number, total: number) =>
  `${grouped(n)} of ${counted(total, 'element')} differ`;
export const brokenPairs = (n: number) => `${grouped(n)} with NaN or inf`;
export const limitEach = (limit: string) =>
  `dashed: the limit, spread evenly over the elements (${limit})`;
export const scatter = 'Golden against mine';
export const scatterAxes = 'golden → · mine ↑';
export const scatterHint = 'On the diagonal, the two values are equal.';
export const scatterSays = (n: number, lo: string, hi: string) =>
  `${counted(n, 'element')} from ${lo} to ${hi}`;
export const elements = (n: number) => counted(n, 'element');
export const element = 'index';
export const showElement = 'Show this element in the heat map';
export const summary = 'Summary';
export const metrics = 'Metrics';
const METRIC_NAMES: Record<string, string> = {
  relative_euclidean_distance: 'relative L2',
  cosine_similarity: 'cosine',
  max_absolute_error: 'max |error|',
};
export const metricName = (name: string) => METRIC_NAMES[name] ?? name.replaceAll('_', ' ');
export const aboutL2 = '‖mine − golden‖ / ‖golden‖: 0 is equal';
export const aboutCosine = 'the cosine of the angle between the two tensors: 1 is parallel';
export const aboutMax = 'the largest |mine − golden|';
export const aboutMetrics: Record<string, string> = {
  relative_euclidean_distance: aboutL2,
  cosine_similarity: aboutCosine,
  max_absolute_error: aboutMax,
  mean_absolute_error: 'the mean of |mine − golden|',
  max_relative_error: 'the largest |mine / golden − 1|, where golden is not about 0',
  mean_relative_error: 'the mean of |mine / golden − 1|, where golden is not about 0',
  kl_divergence: 'KL divergence of the softmax of mine from that of golden',
  worst_row_error: 'the relative L2 error of the row that differs most',
};
export const copy = 'Copy as code';
export const copied = 'copied';
export const notCopied = 'the browser refused to copy: select the text and copy it yourself';

export const rowAxis = 'rows';
export const columnAxis = 'columns';
export const axes = 'Slice';
export const axisIndex = (name: string) => `Index on axis ${name}`;
export const heads = (name: string) => `All slices along ${name}`;
export const headsShown = (first: number, n: number, total: number) =>
  `${n < total ? `${first} to ${first + n - 1} of ${total}` : n}, same colour scale`;
export const previousHeads = 'Previous slices';
export const nextHeads = 'Next slices';
export const heatmap = (rows: number, cols: number) => `Heat map of a ${rows} by ${cols} slice`;
export const window = (
  [down, right]: [string, string],
  [y0, y1, x0, x1]: [number, number, number, number],
) => `${down} ${y0}–${y1 - 1} ↓, ${right} ${x0}–${x1 - 1} →`;
export const windowFlat = (name: string, x0: number, x1: number) => `${name} ${x0}–${x1 - 1} →`;
export const scalar = 'scalar';
export const cells = (fy: number, fx: number) =>
  fy * fx > 1 ? `, each cell shows the largest magnitude of ${fy} × ${fx}` : '';
export const hint =
  'Zoom: wheel or + −. Pan: drag or arrow keys. Reset: 0. Click an element for its value.';
export const empty = 'This tensor has no elements.';
export const nan = 'NaN';
export const notFinite = (nan: number, inf: number) =>
  [nan ? `NaN ${nan}` : '', inf ? `inf ${inf}` : ''].filter(Boolean);
export const histogram = 'Histogram';
export const log = 'log scale';
export const bins = (n: number, lo: string, hi: string) => `${n} bins from ${lo} to ${hi}`;
export const bin = (lo: string, hi: string, n: number) => `${lo} … ${hi}: ${grouped(n)}`;
export const finite = (n: number) => `${grouped(n)} finite`;

export const save = 'Save this view';
export const saveFace = 'save';
export const kinds = { html: 'HTML', svg: 'SVG', png: 'PNG' };
export const saveAs = {
  html: 'Save this explorer as an HTML page beside the notebook',
  svg: 'Save this view as an SVG figure beside the notebook',
  png: 'Save this view as a PNG figure beside the notebook',
};
export const saved = (path: string) => `saved: ${path}`;
export const notInPage = 'not in this saved page: open the run in a notebook to see it';
export const wordsOnly = 'in a saved page, the filter accepts only words';
export const unpackable = (why: string) => `This browser cannot unpack the page (${why}).`;

export const busy = 'kernel busy…';
export const dead =
  'no answer: a cell is running, or the kernel has stopped (then run this cell again)';
export const gone = 'the kernel was restarted or shut down: run this cell again';
export const badMessage = (text: string) => `the kernel could not read a message: ${text}`;

function grouped(n: number): string {
  return n.toLocaleString('en');
}

function counted(n: number, noun: string, nouns = `${noun}s`): string {
  return `${grouped(n)} ${n === 1 ? noun : nouns}`;
}
