/** Colour maps of 256 colours each, as little-endian RGBA words for `ImageData`. */

type Rgb = readonly [number, number, number];

const DIVERGING: Rgb[] = [
  [33, 60, 120],
  [96, 152, 206],
  [244, 244, 242],
  [226, 136, 96],
  [140, 25, 35],
];
const SEQUENTIAL: Rgb[] = [
  [68, 1, 84],
  [59, 82, 139],
  [33, 145, 140],
  [94, 201, 98],
  [253, 231, 37],
];
export const NAN_COLOUR = '#ff00ff';
const NAN_WORD = 0xffff00ff;

function table(stops: Rgb[]): Uint32Array {
  return Uint32Array.from({ length: 256 }, (_, i) => {
    const x = (i / 255) * (stops.length - 1);
    const k = Math.min(stops.length - 2, Math.floor(x));
    const [r, g, b] = [0, 1, 2].map(c =>
      Math.round(stops[k]![c]! * (1 - x + k) + stops[k + 1]![c]! * (x - k)),
    ) as [number, number, number];
    return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  });
}

function css(stops: Rgb[]): string {
  return `linear-gradient(to right, ${stops.map(stop => `rgb(${stop.join(' ')})`).join(', ')})`;
}

const TABLES = { diverging: table(DIVERGING), sequential: table(SEQUENTIAL) };
const GRADIENTS = { diverging: css(DIVERGING), sequential: css(SEQUENTIAL) };

/** Maps values from `lo` to `hi` to colours. The scale is centred on 0 if both signs occur. */
export class Scale {
  readonly lo: number;
  readonly hi: number;
  readonly kind: 'diverging' | 'sequential';

  constructor(lo: number, hi: number, signed = false) {
    this.kind = signed || (lo < 0 && hi > 0) ? 'diverging' : 'sequential';
    const reach = Math.max(-lo, hi);
    this.lo = this.kind === 'diverging' ? -reach : lo;
    this.hi = this.kind === 'diverging' ? reach : hi;
  }

  get gradient(): string {
    return GRADIENTS[this.kind];
  }

  word(value: number): number {
    if (Number.isNaN(value)) return NAN_WORD;
    const width = this.hi - this.lo;
    const at = width > 0 ? ((value - this.lo) / width) * 255 : 127.5; // all the same: the middle
    return TABLES[this.kind][at <= 0 ? 0 : at >= 255 ? 255 : at | 0]!;
  }

  /** Return the colour of a value in CSS notation. */
  css(value: number): string {
    const word = this.word(value);
    return `rgb(${word & 255} ${(word >> 8) & 255} ${(word >> 16) & 255})`;
  }

  /** Return black or white, whichever is readable on the colour of `value`. */
  ink(value: number): string {
    const word = this.word(value);
    const light =
      0.2126 * linear(word & 255) +
      0.7152 * linear((word >> 8) & 255) +
      0.0722 * linear((word >> 16) & 255);
    return light > 0.179 ? '#000' : '#fff';
  }
}

/** Return the linear intensity of an sRGB channel, as in WCAG's definition of contrast. */
function linear(channel: number): number {
  const part = channel / 255;
  return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
}
