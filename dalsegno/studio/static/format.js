// Numbers and times as text.

/** Seconds, with the unit that fits. */
export function seconds(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 100) return `${value.toFixed(0)} s`;
  if (size >= 1) return `${value.toFixed(2)} s`;
  if (size >= 0.01) return `${(value * 1e3).toFixed(0)} ms`;
  return `${(value * 1e3).toFixed(1)} ms`;
}

const WHOLE = new Intl.NumberFormat("en");

/** A whole number with separators. */
export function count(value) {
  return value === null || value === undefined ? "" : WHOLE.format(value);
}

/** A number and a noun. */
export function several(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** Bytes, with the unit that fits. */
export function bytes(value) {
  if (value < 1000) return `${value} B`;
  return value < 1e6 ? `${(value / 1e3).toFixed(1)} kB` : `${(value / 1e6).toFixed(1)} MB`;
}

/** A share in per cent. */
export function share(value) {
  return `${(100 * value).toFixed(1)} %`;
}

/** A JSON value in one line; nothing for an absent one. */
export function json(value) {
  return value === null || value === undefined ? "nothing" : JSON.stringify(value);
}

/** How a request ended, as a sign and a word: the sign is not only a colour. */
export const SIGNS = { finished: "✓", failed: "✕", rejected: "⊘", cancelled: "◼", open: "◌" };
