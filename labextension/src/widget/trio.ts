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
import type { Which } from './wire';

const WHICH: Which[] = ['golden', 'mine', 'difference'];

export class Trio {
  readonly root: HTMLElement;
  private maps: Heatmap[];
  private line = h('div', { class: 'llmdebug-linked', 'aria-live': 'polite' });

  constructor(ask: Ask) {
    this.maps = WHICH.map(() => {
      const map: Heatmap = new Heatmap(ask, {
        moved: window => this.others(map).forEach(other => other.look(window)),
        pointed: at => this.point(at),
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

  show(slice: Omit<Slice, 'which'>): void {
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

  private point(at: Cell | null): void {
    this.maps.forEach(map => map.point(at));
    const values = this.maps
      .map((map, i) => `${SIDES[WHICH[i]!]} ${figure(map.valueAt(at), 5)}`)
      .join(' · ');
    this.line.textContent = at ? `${this.maps[0]!.where(at)}: ${values}` : T.linkedHint;
  }

  /** Give golden and mine one colour scale, so that equal colours mean equal values. */
  private share(): void {
    const views = this.maps.slice(0, 2).map(map => map.view);
    const values = views
      .flatMap(view => (view ? [numeric(view.lo), numeric(view.hi)] : []))
      .filter(value => !Number.isNaN(value));
    if (views.includes(null) || values.length === 0) return;
    this.maps
      .slice(0, 2)
      .forEach(map => map.paintBetween(Math.min(...values), Math.max(...values)));
  }
}
