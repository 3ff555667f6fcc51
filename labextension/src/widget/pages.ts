/** A long list in the kernel, fetched page by page. */

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

  /** Return an item if its page has been fetched. */
  at(index: number): T | undefined {
    return this.loaded.get(Math.floor(index / this.size))?.[index % this.size];
  }

  /** Return an item; fetch its page if necessary. */
  async want(index: number): Promise<T | undefined> {
    return (await this.page(Math.floor(index / this.size)))[index % this.size];
  }

  /** Fetch the missing pages of items `first` to `last`. Return true if any was missing. */
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
    const items = reply?.items ?? []; // not fetched again: the error has been shown
    this.loaded.set(p, items);
    return items;
  }
}
