/** The worst row of every layer at every step. */
import { figure, pathText } from './format';
import type { Reply } from './rpc';
import { STATES } from './strings';
import * as T from './strings';
import type { Layer, Step } from './wire';

/** States of a cell, as the kernel numbers them: see `CallCell`. */
export const [NOTHING, UNMATCHED, REWRITTEN, DIVERGED, MADE] = [0, 1, 2, 6, 7] as const;

let serials = 0;

/** A layer at a step. */
export interface Place {
  layer: number;
  step: number;
}

export class LayerErrors {
  readonly layers: Layer[];
  /** Differs from that of every other one. */
  readonly serial = ++serials;
  private error: Float32Array;
  private limit: Float32Array;
  private rows: Int32Array;
  private states: Uint8Array;
  private shares: Float32Array;
  private differing: Int32Array;
  private texts: string[];

  constructor(
    { answer, buffers }: Reply<'layers'>,
    readonly steps: Step[],
  ) {
    const bytes = buffers.map(({ buffer, byteOffset, byteLength }) =>
      buffer.slice(byteOffset, byteOffset + byteLength),
    );
    this.layers = answer.layers;
    this.error = new Float32Array(bytes[0]!);
    this.limit = new Float32Array(bytes[1]!);
    this.rows = new Int32Array(bytes[2]!);
    this.states = new Uint8Array(bytes[3]!);
    // a page that was saved by an earlier version has no more
    const [shares, differing] = bytes.slice(4);
    this.shares = shares ? new Float32Array(shares) : new Float32Array();
    this.differing = differing ? new Int32Array(differing) : new Int32Array();
    this.texts = differing ? answer.differing : [];
  }

  private at({ layer, step }: Place): number {
    return layer * this.steps.length + step;
  }

  errorAt(place: Place): number {
    return this.error[this.at(place)]!;
  }

  limitAt(place: Place): number {
    return this.limit[this.at(place)]!;
  }

  row(place: Place): number {
    return this.rows[this.at(place)]!;
  }

  state(place: Place): number {
    return this.states[this.at(place)]!;
  }

  /** Return which part of its tokens differs; 1 if that is unknown, or not of some of them. */
  share(place: Place): number {
    const share = this.shares[this.at(place)] ?? NaN;
    return Number.isNaN(share) ? 1 : share;
  }

  /** Return error over limit; NaN if there is no figure. */
  ratio(place: Place): number {
    const error = this.errorAt(place);
    return error === 0 ? 0 : error / (this.limitAt(place) || 0);
  }

  name(layer: number): string {
    const { path, node } = this.layers[layer]!;
    return node < 0 ? T.around : pathText(path);
  }

  /** Describe a cell in words. */
  says(place: Place): string {
    const error = this.errorAt(place);
    const limit = this.limitAt(place);
    const ratio = this.ratio(place);
    const differing = this.texts[this.differing[this.at(place)] ?? 0];
    const figures = T.errorLimit(figure(error, 3), figure(Number.isNaN(limit) ? null : limit, 3));
    return [
      `${this.name(place.layer)} · ${this.steps[place.step]?.label}: ${STATES[this.state(place)]}`,
      Number.isNaN(error) ? '' : `, ${figures}`,
      ratio > 1 ? T.beyond(figure(ratio, 2)) : '',
      differing ? `, ${differing}` : '',
    ].join('');
  }

  /** Return ``layer 5`` for ``model.layers.5``, else the name. */
  shortName(layer: number): string {
    const { path, node } = this.layers[layer]!;
    const last = path.split('.').at(-1) ?? '';
    return /^\d+$/.test(last) ? T.layer(last) : node < 0 ? T.around : pathText(last);
  }

  /** Return the layer of a path: the longest one that holds it; -1 if there is none. */
  layerOf(path: string): number {
    let [best, length] = [this.layers.findIndex(({ node }) => node < 0), -1];
    this.layers.forEach((layer, i) => {
      const holds = layer.node >= 0 && `${path}.`.replace('/', '.').startsWith(`${layer.path}.`);
      if (holds && layer.path.length > length) [best, length] = [i, layer.path.length];
    });
    return best;
  }

  /** Return the first cell that makes an error, else the first diverged one. */
  firstBad(): Place | undefined {
    let found: Place | undefined;
    for (let step = 0; step < this.steps.length; step++)
      for (let layer = 0; layer < this.layers.length; layer++) {
        const state = this.state({ layer, step });
        if (state === MADE) return { layer, step };
        if (state === DIVERGED) found ??= { layer, step };
      }
    return found;
  }
}
