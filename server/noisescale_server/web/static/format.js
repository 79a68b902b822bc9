// Numbers as people write them: four figures, thousands marked, as noisescale.explain.number does.
const grouped = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 4, useGrouping: false });

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return grouped.format(value);
  if (size !== 0 && size < 1e-4) return value.toExponential(3).replace(/\.?0+e/, "e");
  return plain.format(value);
}

// A batch size or a count: a whole one is written to the last figure.
export function exact(value) {
  return Number.isInteger(value) ? value.toLocaleString("en") : number(value);
}

export function interval(lower, upper) {
  if (!lower && upper === null) return "not known yet";
  return upper === null ? `${number(lower)} or more` : `${number(lower)} – ${number(upper)}`;
}

const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

export function ago(then) {
  const seconds = Math.max(0, Math.floor((Date.now() - then) / 1000));
  const [unit, length] = units.find(([, long]) => seconds >= long) ?? ["s", 1];
  return seconds ? `${Math.floor(seconds / length)} ${unit} ago` : "just now";
}
