import { expect, test } from 'vitest';
import {
  exactFloat32,
  figure,
  numeric,
  shortPath,
  shortSlot,
  shortType,
} from '../src/widget/format';
import type { Row } from '../src/widget/wire';

test.each([
  [null, '–'],
  ['nan', 'nan'],
  ['-inf', '-inf'],
  [NaN, 'nan'],
  [-Infinity, '-inf'],
  [0, '0'],
  [-0, '0'],
  [42, '42'],
  [1e6, '1e6'],
  [123456.789, '123500'],
  [0.001, '0.001'],
  [0.00099996, '1e-3'],
  [-1.5e-9, '-1.5e-9'],
  [1.25e20, '1.25e20'],
])('the figure %s is formatted as %s', (value, text) => {
  expect(figure(value)).toBe(text);
});

test('the text of a float32 parses to the same float32 and is as short as possible', () => {
  const bits = new DataView(new ArrayBuffer(4));
  for (let i = 0; i < 5000; i++) {
    bits.setUint32(0, (i * 2654435761) >>> 0);
    const value = bits.getFloat32(0);
    if (Number.isFinite(value)) expect(Math.fround(Number(exactFloat32(value)))).toBe(value);
  }
  expect(exactFloat32(Math.fround(0.1))).toBe('0.1');
});

test('the texts that stand for NaN and infinities are parsed', () => {
  expect([numeric('nan'), numeric('inf'), numeric('-inf'), numeric(null), numeric(2)]).toEqual([
    NaN,
    Infinity,
    -Infinity,
    NaN,
    2,
  ]);
});

test('a shortened path loses its first names and never exceeds its room', () => {
  const path = 'model.layers.10.self_attn.q_proj';
  expect(shortPath(path, '', 40)).toBe(path);
  expect(shortPath(path, 'model.layers.10', 40)).toBe('self_attn.q_proj');
  expect(shortPath(path, 'model.layers.1', 40)).toBe(path);
  expect(shortPath(path, path, 40)).toBe('.');
  for (let room = 9; room < 40; room++)
    expect(shortPath(path, '', room).length).toBeLessThanOrEqual(room);
  expect(shortPath(path, '', 18)).toBe('…self_attn.q_proj');
});

test('types and slots have short names', () => {
  expect(
    ['bfloat16', 'float8_e4m3fn', 'int64', 'uint8', 'bool', 'complex64'].map(shortType),
  ).toEqual(['bf16', 'f8_e4m3fn', 'i64', 'u8', 'bool', 'c64']);
  expect(shortSlot({ role: 'input', slot: '0', call: 2 } as Row)).toBe('in[0] #2');
  expect(shortSlot({ role: 'backward output', slot: 'kwargs.x', call: 0 } as Row)).toBe(
    'backward output[kwargs.x]',
  );
});
