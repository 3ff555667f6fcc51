/** Names and parents of paths. */

/** Return the last name of a path, which may be one of Windows. */
export function nameOf(path: string): string {
  return path.replace(/[\\/]+$/, '').replace(/^.*[\\/]/, '');
}

/** Return the folder of a path in the file browser, '' for the root. */
export function parentOf(path: string): string {
  return path.replace(/[^/]*$/, '').replace(/\/$/, '');
}
