/** Formats figures and names. */
import type { Num, Row } from './wire';
import * as T from './strings';

/** Format a number with up to `digits` significant digits; `–` stands for a missing one. */
export function figure(value: Num, digits = 4): string {
  if (value === null) return '–';
  if (typeof value === 'string') return value;
  if (!Number.isFinite(value)) return Number.isNaN(value) ? 'nan' : value > 0 ? 'inf' : '-inf';
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e-3 && size < 1e6) return String(Number(value.toPrecision(digits)));
  return value
    .toExponential(digits - 1)
    .replace(/\.?0+e/, 'e')
    .replace('e+', 'e');
}

/** Return the shortest decimal text that parses to exactly this float32. */
export function exactFloat32(value: number): string {
  for (let digits = 6; digits < 9; digits++) {
    const text = value.toPrecision(digits);
    if (Math.fround(Number(text)) === value) return String(Number(text));
  }
  return figure(value, 9);
}

/** Convert a `Num` to a number; a missing one becomes NaN. */
export function numeric(value: Num): number {
  if (typeof value === 'number') return value;
  if (value === 'inf') return Infinity;
  return value === '-inf' ? -Infinity : NaN;
}

export function shapeText(shape: number[]): string {
  return `[${shape.join(', ')}]`;
}

export function slotText(row: Row): string {
  return `${row.role}[${row.slot}]${row.call ? ` #${row.call}` : ''}`;
}

const SHORT_ROLES: Record<string, string> = { input: 'in', output: 'out' };

export function shortSlot(row: Row): string {
  return slotText({ ...row, role: SHORT_ROLES[row.role] ?? row.role });
}

/** Abbreviate a dtype: `bfloat16` → `bf16`, `int64` → `i64`. */
export function shortType(dtype: string): string {
  return dtype
    .replace(/^bfloat/, 'bf')
    .replace(/^float/, 'f')
    .replace(/^uint/, 'u')
    .replace(/^int/, 'i')
    .replace(/^complex/, 'c');
}

export function pathText(path: string): string {
  return path || T.root;
}

/**
 * Shorten a path to at most `room` characters.
 *
 * The path becomes relative to `base`, then loses leading names: the last ones matter most.
 */
export function shortPath(path: string, base: string, room: number): string {
  if (base && path === base) return '.';
  const full = base && path.startsWith(`${base}.`) ? path.slice(base.length + 1) : pathText(path);
  if (full.length <= room) return full;
  const names = full.split('.');
  while (names.length > 1 && names.join('.').length + 1 > room) names.shift();
  const rest = names.join('.');
  return `…${rest.slice(Math.max(0, rest.length - Math.max(room, 8) + 1))}`;
}

/** Return the last `room` characters of a text, on one line: a prompt's end matters most. */
export function endOf(text: string, room: number): string {
  const characters = [...text.replace(/\s*\n\s*/g, ' ↵ ')];
  return characters.length > room ? `…${characters.slice(1 - room).join('')}` : characters.join('');
}
