/** The bars of a histogram, each with a tooltip. */
import { svg } from './dom';

export const BARS_HEIGHT = 64;

/**
 * Draw one bar per count. `rise` maps a count to the height of its bar.
 *
 * Callers may add shapes: a bar is 1 unit wide, and y = 0 is at the top.
 */
export function bars(
  counts: number[],
  label: string,
  rise: (count: number) => number,
  title: (bar: number) => string,
): SVGElement {
  const top = rise(Math.max(1, ...counts));
  const picture = svg('svg', {
    viewBox: `0 0 ${counts.length || 1} ${BARS_HEIGHT}`,
    preserveAspectRatio: 'none',
    role: 'img',
    'aria-label': label,
  });
  counts.forEach((n, i) => {
    const height = n ? Math.max(1, (rise(n) / top) * BARS_HEIGHT) : 0;
    picture.append(
      svg(
        'rect',
        { x: i, y: BARS_HEIGHT - height, width: 0.9, height },
        svg('title', {}, title(i)),
      ),
    );
  });
  return picture;
}
