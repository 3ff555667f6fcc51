import { expect, test } from 'vitest';
import { Pages } from '../src/widget/pages';

function counting(total: number, asked: number[]): Pages<number> {
  return new Pages(10, (start, n) => {
    asked.push(start);
    const length = Math.max(0, Math.min(n, total - start));
    return Promise.resolve({ total, items: Array.from({ length }, (_, i) => start + i) });
  });
}

test('each page in view is fetched once, including the last one', async () => {
  const asked: number[] = [];
  const pages = counting(25, asked);
  expect(await pages.load(8, 25)).toBe(true);
  expect(await pages.load(0, 25)).toBe(false);
  expect(asked).toEqual([0, 10, 20]);
  expect([pages.total, pages.at(24), pages.at(25)]).toEqual([25, 24, undefined]);
});

test('two concurrent requests for a page fetch it once', async () => {
  const asked: number[] = [];
  const pages = counting(25, asked);
  expect(await Promise.all([pages.want(13), pages.want(14)])).toEqual([13, 14]);
  expect(asked).toEqual([10]);
});

test('a page that cannot be read stays empty and is not fetched again', async () => {
  let asked = 0;
  const pages = new Pages<number>(10, () => {
    asked++;
    return Promise.resolve(undefined);
  });
  expect(await pages.want(3)).toBeUndefined();
  expect(await pages.load(0, 10)).toBe(false);
  expect([asked, pages.total]).toEqual([1, 0]);
});
