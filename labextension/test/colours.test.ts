import { expect, test } from 'vitest';
import { Scale } from '../src/widget/colours';

const rgb = (word: number) => [word & 255, (word >> 8) & 255, (word >> 16) & 255];

test('a scale with both signs is centred on zero, even if one side is much larger', () => {
  const scale = new Scale(-0.1, 3);
  expect([scale.kind, scale.lo, scale.hi]).toEqual(['diverging', -3, 3]);
  expect(Math.min(...rgb(scale.word(0)))).toBeGreaterThan(220);
});

test('values outside the scale have the colour of its ends; NaN has its own colour', () => {
  const scale = new Scale(0, 1);
  expect(scale.kind).toBe('sequential');
  expect([scale.word(-5), scale.word(-Infinity)]).toEqual([scale.word(0), scale.word(0)]);
  expect([scale.word(7), scale.word(Infinity)]).toEqual([scale.word(1), scale.word(1)]);
  expect(rgb(scale.word(NaN))).toEqual([255, 0, 255]);
});

test('a tensor with a single value has the colour in the middle, as no difference has', () => {
  const middle = new Scale(0, 255).word(127.5);
  for (const value of [0, 2.5, -2.5]) expect(new Scale(value, value).word(value)).toBe(middle);
  expect(new Scale(0, 0, true).word(0)).toBe(new Scale(-1, 1, true).word(0));
});

test('text on a colour has a contrast of at least 4.5 to 1 (WCAG)', () => {
  const linear = (c: number) =>
    c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
  for (const scale of [new Scale(-1, 1), new Scale(0, 1)])
    for (let at = scale.lo; at <= scale.hi; at += 1 / 64) {
      const [r, g, b] = rgb(scale.word(at)).map(linear) as [number, number, number];
      const light = 0.2126 * r + 0.7152 * g + 0.0722 * b;
      expect(
        scale.ink(at) === '#fff' ? 1.05 / (light + 0.05) : (light + 0.05) / 0.05,
      ).toBeGreaterThan(4.5);
    }
});
