/** A long list on the kernel's side, fetched in pages as they come into view. */

export type Fetch<T> = (
  start: number,
  n: number,
) => Promise<{ total: number; items: T[] } | undefined>;

export class Pages<T> {
  total = 0;
  private pages = new Map<number, Promise<T[]>>();
  private loaded = new Map<number, T[]>();

  constructor(
    private size: number,
    private fetch: Fetch<T>,
  ) {}

  /** The item if its page is here. */
  at(index: number): T | undefined {
    return this.loaded.get(Math.floor(index / this.size))?.[index % this.size];
  }

  async want(index: number): Promise<T | undefined> {
    return (await this.page(Math.floor(index / this.size)))[index % this.size];
  }

  /** Fetch what is missing of `first` to `last`; true if anything was. */
  async load(first: number, last: number): Promise<boolean> {
    const missing: Promise<T[]>[] = [];
    for (let p = Math.floor(first / this.size); p * this.size < last; p++)
      if (!this.loaded.has(p)) missing.push(this.page(p));
    await Promise.all(missing);
    return missing.length > 0;
  }

  private page(p: number): Promise<T[]> {
    let page = this.pages.get(p);
    if (!page) this.pages.set(p, (page = this.request(p)));
    return page;
  }

  private async request(p: number): Promise<T[]> {
    const reply = await this.fetch(p * this.size, this.size);
    if (reply) this.total = reply.total;
    const items = reply?.items ?? []; // not asked for again: the error is on show
    this.loaded.set(p, items);
    return items;
  }
}
