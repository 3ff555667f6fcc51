/**
 * Golden, mine and their difference side by side.
 *
 * The maps share window and pointer; golden and mine also share the colour scale.
 */
import { h } from './dom';
import { figure, numeric } from './format';
import { Heatmap, type Slice } from './heatmap';
import type { Ask } from './rpc';
import { SIDES } from './strings';
import * as T from './strings';
import type { Cell } from './window';
import type { Side, Which } from './wire';

const WHICH: Which[] = ['golden', 'mine', 'difference'];

export class Trio {
  readonly root: HTMLElement;
  private maps: Heatmap[];
  private sides: Side[] = [];
  private line = h('div', { class: 'llmdebug-linked', 'aria-live': 'polite' });

  constructor(ask: Ask) {
    this.maps = WHICH.map(() => {
      const map: Heatmap = new Heatmap(ask, {
        moved: window => this.others(map).forEach(other => other.look(window)),
        pointed: at => this.point(map, at),
        picked: at => this.others(map).forEach(other => void other.mark(at)),
        drawn: () => this.share(),
      });
      return map;
    });
    this.root = h(
      'div',
      { class: 'llmdebug-trio' },
      ...this.maps.map((map, i) =>
        h('div', {}, h('div', { class: 'llmdebug-side' }, SIDES[WHICH[i]!]), map.root),
      ),
      this.line,
    );
  }

  /** `sides`: their extremes make one colour scale for all slices. */
  show(slice: Omit<Slice, 'which'>, sides: Side[]): void {
    this.sides = sides;
    this.line.textContent = T.linkedHint;
    this.maps.forEach((map, i) => map.show({ ...slice, which: WHICH[i]! }));
  }

  mark(at: Cell): void {
    this.maps.forEach(map => void map.mark(at));
  }

  dispose(): void {
    this.maps.forEach(map => map.dispose());
  }

  private others(map: Heatmap): Heatmap[] {
    return this.maps.filter(other => other !== map);
  }

  /** `under`: the map that the pointer is on; the others may have nothing to show. */
  private point(under: Heatmap, at: Cell | null): void {
    this.maps.forEach(map => map.point(at));
    const values = this.maps
      .map((map, i) => `${SIDES[WHICH[i]!]} ${figure(map.valueAt(at), 5)}`)
      .join(' · ');
    this.line.textContent = at ? `${under.where(at)}: ${values}` : T.linkedHint;
  }

  /** Give golden and mine one colour scale for all slices, and the difference one around zero. */
  private share(): void {
    const of = (...which: Which[]): number[] =>
      this.sides
        .filter(side => which.includes(side.which))
        .flatMap(side => [numeric(side.min), numeric(side.max)])
        .filter(value => Number.isFinite(value));
    const values = of('golden', 'mine');
    if (values.length)
      this.maps
        .slice(0, 2)
        .forEach(map => map.paintBetween(Math.min(...values), Math.max(...values)));
    const reach = Math.max(...of('difference').map(Math.abs), 0);
    this.maps[2]!.paintBetween(-reach, reach, true);
  }
}
