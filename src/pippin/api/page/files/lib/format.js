// Numbers as people read them.

const WHOLE = new Intl.NumberFormat("en-US");

export const count = (n) => WHOLE.format(Math.round(n));
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

export function seconds(s) {
  if (s === null || s === undefined || Number.isNaN(s)) return "–";
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 0.0995) return `${(s * 1e3).toFixed(s < 0.00995 ? 1 : 0)} ms`;
  if (s < 1) return `${Math.round(s * 1e3)} ms`;
  return s < 100 ? `${s.toFixed(s < 10 ? 2 : 1)} s` : `${count(s)} s`;
}

export function bytes(n) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  let value = n;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function rate(perSecond) {
  return perSecond >= 100 ? count(perSecond) : perSecond.toFixed(1);
}

export const sum = (values) => values.reduce((total, value) => total + value, 0);
export const percent = (share) => (share > 0 && share < 0.005 ? "<1%" : `${Math.round(share * 100)}%`);
