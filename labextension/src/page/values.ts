/** Cuts slices out of a tensor that the page holds as a whole, and reduces them like the kernel. */
import type { Heads, HeadsRequest, View, ViewRequest } from '../widget/wire';

export interface Values {
  shape: number[];
  data: Float32Array;
}
interface Plane {
  rows: number;
  cols: number;
  at: (y: number, x: number) => number;
}

/** At most so many slices per answer. */
const HEADS = 64;

/** Answer a `view` or `heads` request. */
export function planes(
  values: Values,
  request: ViewRequest | HeadsRequest,
): { answer: object; buffers: DataView[] } {
  const { axes, fixed, size } = request;
  if (request.op === 'view') {
    const { answer, cells } = window(plane(values, axes, fixed), request, size);
    return { answer, buffers: [new DataView(cells.buffer)] };
  }
  const total = values.shape[request.axis] ?? 0;
  const first = Math.min(total, request.first);
  const count = Math.min(total - first, HEADS);
  const whole = { y0: 0, x0: 0, y1: 0, x1: 0 };
  const slices = Array.from({ length: count }, (_, head) => {
    const at = fixed.map((index, axis) => (axis === request.axis ? first + head : index));
    return window(plane(values, axes, at), whole, size);
  });
  const { h, w } = slices[0]?.answer ?? { h: 0, w: 0 };
  const cells = new Float32Array(count * h * w);
  slices.forEach((slice, head) => cells.set(slice.cells, head * h * w));
  const answer: Heads = { h, w, first, count, total, ...range(cells) };
  return { answer, buffers: [new DataView(cells.buffer)] };
}

function plane({ shape, data }: Values, [row, column]: number[], fixed: number[]): Plane {
  const strides = shape.map((_, axis) =>
    shape.slice(axis + 1).reduce((product, size) => product * size, 1),
  );
  const start = shape.reduce(
    (sum, size, axis) =>
      axis === row || axis === column
        ? sum
        : sum + strides[axis]! * Math.max(0, Math.min(fixed[axis] ?? 0, size - 1)),
    0,
  );
  const [down, right] = [strides[row!] ?? 0, strides[column!] ?? 0];
  return {
    rows: shape[row!] ?? 1,
    cols: shape[column!] ?? 1,
    at: (y, x) => data[start + y * down + x * right]!,
  };
}

type Window = Pick<ViewRequest, 'y0' | 'x0' | 'y1' | 'x1'>;

function window(
  { rows, cols, at }: Plane,
  { y0, x0, y1, x1 }: Window,
  size: number,
): { answer: View; cells: Float32Array<ArrayBuffer> } {
  const end = { y: y1 > y0 ? Math.min(y1, rows) : rows, x: x1 > x0 ? Math.min(x1, cols) : cols };
  const [fy, fx] = [
    Math.max(1, Math.ceil((end.y - y0) / size)),
    Math.max(1, Math.ceil((end.x - x0) / size)),
  ];
  const [h, w] = [Math.ceil((end.y - y0) / fy), Math.ceil((end.x - x0) / fx)];
  const cells = new Float32Array(h * w);
  for (let y = y0; y < end.y; y++)
    for (let x = x0; x < end.x; x++) {
      const cell = Math.floor((y - y0) / fy) * w + Math.floor((x - x0) / fx);
      const fresh = (y - y0) % fy === 0 && (x - x0) % fx === 0;
      const value = at(y, x);
      if (fresh || Number.isNaN(value) || Math.abs(value) > Math.abs(cells[cell]!))
        cells[cell] = value;
    }
  return {
    answer: { h, w, fy, fx, y0, x0, y1: end.y, x1: end.x, rows, cols, ...range(cells) },
    cells,
  };
}

function range(cells: Float32Array): Pick<View, 'lo' | 'hi'> {
  let [lo, hi] = [Infinity, -Infinity];
  for (const value of cells)
    if (Number.isFinite(value)) [lo, hi] = [Math.min(lo, value), Math.max(hi, value)];
  return lo > hi ? { lo: null, hi: null } : { lo, hi };
}
