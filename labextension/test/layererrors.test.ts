import { expect, test } from 'vitest';
import { DIVERGED, LayerErrors, MADE, NOTHING, UNMATCHED } from '../src/widget/layererrors';
import type { Step } from '../src/widget/wire';

const MATCH = 3;

/** Two layers and the calls outside them, two steps. Buffers start at odd offsets, as sent ones. */
function errors(worst = DIVERGED as number, sent = 6): LayerErrors {
  const place = (array: { buffer: ArrayBufferLike; byteLength: number }) => {
    const room = new Uint8Array(array.byteLength + 3);
    room.set(new Uint8Array(array.buffer), 3);
    return new DataView(room.buffer, 3);
  };
  const layers = [
    { path: 'a.0', type: 'Layer', node: 1 },
    { path: 'a.1', type: 'Layer', node: 2 },
    { path: '', type: '', node: -1 },
  ];
  const buffers = [
    new Float32Array([0, 0.5, 0.2, 3, NaN, NaN]),
    new Float32Array([0, 1, 0.1, 0, NaN, NaN]),
    new Int32Array([0, 1, 2, 3, -1, 4]),
    new Uint8Array([MATCH, MATCH, DIVERGED, worst, NOTHING, UNMATCHED]),
    new Float32Array([NaN, NaN, 0.7, NaN, NaN, NaN]),
    new Int32Array([0, 0, 1, 0, 0, 0]),
  ].map(place);
  const differing = ['', 'tokens 12-39 of 40'];
  const answer = { layers, steps: 2, differing };
  return new LayerErrors({ answer, buffers: buffers.slice(0, sent) }, [
    { label: '0 prefill' },
    { label: '1 decode' },
  ] as Step[]);
}

test('error over limit: 0 over 0 is 0, an error over 0 is infinite, no figure is NaN', () => {
  const all = errors();
  const ratios = [0, 1, 2].flatMap(layer => [0, 1].map(step => all.ratio({ layer, step })));
  expect(ratios.map(ratio => Math.round(ratio * 1000) / 1000)).toEqual([
    0,
    0.5,
    2,
    Infinity,
    NaN,
    NaN,
  ]);
});

test('the first mismatch is the earliest one, unless another one makes the error', () => {
  expect(errors().firstBad()).toEqual({ layer: 1, step: 0 });
  expect(errors(MADE).firstBad()).toEqual({ layer: 1, step: 1 });
});

test('a path belongs to the layer around it, and to what is outside if there is none', () => {
  const all = errors();
  expect(['a.1', 'a.1.mlp', 'a.1/Torch.add', 'a.10', 'b'].map(path => all.layerOf(path))).toEqual([
    1, 1, 1, 2, 2,
  ]);
});

test('a cell names its layer, step, verdict and available figures', () => {
  const all = errors();
  expect(all.says({ layer: 1, step: 0 })).toMatch(/^a\.1 · 0 prefill: diverged.*0\.2.*0\.1.*2/);
  expect(all.says({ layer: 2, step: 1 })).toMatch(/· 1 decode: unmatched$/);
});

test('a cell is filled as far as its tokens differ, else wholly, and says which these are', () => {
  const all = errors();
  const shares = [0, 1].map(step => all.share({ layer: 1, step }));
  expect(shares.map(share => Math.round(share * 100))).toEqual([70, 100]);
  expect(all.says({ layer: 1, step: 0 })).toMatch(/, tokens 12-39 of 40$/);
  expect(all.says({ layer: 1, step: 1 })).not.toContain('tokens');
});

test('a page that an earlier version saved knows no shares: its cells are filled', () => {
  const old = errors(MADE, 4);
  expect(old.share({ layer: 1, step: 0 })).toBe(1);
  expect(old.says({ layer: 1, step: 0 })).not.toContain('tokens');
});
