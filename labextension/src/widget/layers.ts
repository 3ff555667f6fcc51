/** The errors of all layers: as a map of layers by tokens, and as lines along depth. */
import { h } from './dom';
import { Growth } from './growth';
import { LayerErrors, type PlaceEvents } from './layererrors';
import { LayerMap } from './layermap';
import type { Ask } from './rpc';
import * as T from './strings';
import type { Layer, Step } from './wire';

export class Layers {
  readonly root: HTMLElement;
  private hint = h('div', { class: 'llmdebug-told' }, T.mapHint);
  private map: LayerMap;
  private growth: Growth;
  /** Fetch the errors again, after the verdicts have changed. */
  readonly reload: () => Promise<void>;

  constructor(
    private ask: Ask,
    private steps: Step[],
    choose: (layer: Layer, step: number, row: number) => void,
  ) {
    let errors: LayerErrors | undefined;
    const events: PlaceEvents = {
      choose: place => errors && choose(errors.layers[place.layer]!, place.step, errors.row(place)),
      tell: text => void (this.hint.textContent = text || T.mapHint),
    };
    this.map = new LayerMap(events);
    this.growth = new Growth(events);
    this.root = h(
      'details',
      { class: 'llmdebug-layers', open: true, hidden: true },
      h('summary', {}, T.layers),
      h('div', { class: 'llmdebug-layer-views' }, this.map.root, this.growth.root),
      this.hint,
    );
    this.reload = async () => void (errors = (await this.load()) ?? errors);
    void this.reload();
  }

  /** Mark the selected step. */
  show(step: number): void {
    this.map.show(step);
    this.growth.show(step);
  }

  dispose(): void {
    this.map.dispose();
    this.growth.dispose();
  }

  private async load(): Promise<LayerErrors | undefined> {
    const reply = await this.ask('layers', {});
    if (!reply) return undefined;
    const errors = new LayerErrors(reply, this.steps);
    this.root.hidden = errors.layers.length * this.steps.length < 2; // a map needs two cells
    this.map.take(errors);
    this.growth.take(errors);
    return errors;
  }
}
