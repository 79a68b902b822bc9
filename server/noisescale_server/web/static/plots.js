// How charts look, whatever they show: colours from the style sheet, labels at the lines' ends.
import { number } from "./format.js";

const probe = document.createElement("span");
probe.hidden = true;
document.documentElement.append(probe);

export function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

export function faded(name, alpha) {
  const [r, g, b] = colour(name).match(/[\d.]+/g);
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
}

const coarse = matchMedia("(pointer: coarse)").matches;
export const config = { displayModeBar: false, responsive: true, doubleClick: "reset", scrollZoom: false };

export function axis(options = {}) {
  return {
    gridcolor: colour("line"), linecolor: colour("line-2"), zeroline: false, ticks: "",
    tickfont: { color: colour("ink-3"), size: 11.5 }, title: { font: { color: colour("ink-3"), size: 12 }, standoff: 8 },
    fixedrange: coarse, automargin: true, ...options,
  };
}

// A logarithmic axis: 1, 2, 5, 10, ... with thousands marked.
export function logAxis([low, high], { small = false, ...options } = {}) {
  const span = Math.log10(high / low) * (small ? 2 : 1); // a small chart has room for half as many
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const digit of span > 3.5 ? [1] : span > 2.2 ? [1, 3] : [1, 2, 5]) {
      const value = digit * 10 ** power;
      if (value >= low && value <= high) ticks.push(value);
    }
  }
  return axis({ type: "log", range: [Math.log10(low), Math.log10(high)], tickvals: ticks, ticktext: ticks.map(number), ...options });
}

export function layout(options) {
  return {
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink-2") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 52, r: 12, t: 14, b: 40 }, showlegend: false, hovermode: "x unified", dragmode: coarse ? false : "zoom",
    hoverlabel: { bgcolor: colour("surface"), bordercolor: colour("line-2"), font: { color: colour("ink"), size: 12 } },
    uirevision: "kept", ...options,
  };
}

// The width, in pixels, that the longest of these names takes at the right edge of a chart.
export function roomFor(labels) {
  return 20 + 7.2 * Math.max(...labels.map(({ text }) => text.length));
}

// Names at the right edge of a chart with a logarithmic axis, pushed apart where they would touch.
export function endLabels(labels, [low, high], height) {
  const pixels = (value) => (1 - Math.log10(value / low) / Math.log10(high / low)) * height;
  const placed = labels.filter(({ value }) => value > 0).map((label) => ({ ...label, at: Math.min(height, Math.max(0, pixels(label.value))) }));
  placed.sort((a, b) => a.at - b.at);
  for (let i = 1; i < placed.length; i++) placed[i].at = Math.max(placed[i].at, placed[i - 1].at + 17);
  return placed.map(({ text, at, shade }) => ({
    xref: "paper", yref: "paper", x: 1, y: 1 - at / height, xanchor: "left", yanchor: "middle", xshift: 6,
    text, showarrow: false, font: { color: colour(shade), size: 12, weight: 600 },
  }));
}

// A band between two columns, as polygons: bounded stretches, and those without an upper end.
export function band(x, lower, upper, [low, high], shade) {
  const pieces = { bounded: [], open: [] };
  let from = 0;
  const kind = (i) => (lower[i] > 0 ? (upper[i] === null ? "open" : "bounded") : null);
  for (let i = 1; i <= x.length; i++) {
    if (i < x.length && kind(i) === kind(from)) continue;
    const to = Math.min(i, x.length - 1); // up to the next piece's first point, so that they touch
    if (kind(from)) pieces[kind(from)].push([from, kind(to) ? to : i - 1]);
    from = i;
  }
  const trace = (ranges, alpha) => {
    const xs = [];
    const ys = [];
    for (const [a, b] of ranges) {
      for (let i = a; i <= b; i++) { xs.push(x[i]); ys.push(Math.max(lower[i], low)); }
      for (let i = b; i >= a; i--) { xs.push(x[i]); ys.push(Math.min(upper[i] ?? high, high)); }
      xs.push(null);
      ys.push(null);
    }
    return { x: xs, y: ys, type: "scatter", mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: faded(shade, alpha), hoverinfo: "skip" };
  };
  return [trace(pieces.open, .07), trace(pieces.bounded, .17)];
}

export function spacious(plot) {
  return plot.clientWidth > 520;
}

export function draw(plot, traces, options, label) {
  plot.setAttribute("aria-label", label);
  return Plotly.react(plot, traces, layout(options), config);
}

export async function savePng(plot, name, title) {
  const shown = plot.layout;
  const address = await Plotly.toImage(
    {
      data: plot.data,
      layout: {
        ...shown, paper_bgcolor: colour("surface"), margin: { ...shown.margin, t: 60 },
        title: { text: title, x: 0.02, xanchor: "left", font: { size: 17, color: colour("ink") } },
      },
    },
    { format: "png", width: 1200, height: 620, scale: 2 },
  );
  const link = document.createElement("a");
  link.href = address;
  link.download = `${name}.png`;
  link.click();
}

// The same numbers for those who read and do not look: at most so many rows, evenly chosen.
export function fillTable(box, names, columns, rows = 40) {
  const count = columns[0]?.length ?? 0;
  const chosen = [...new Set(Array.from({ length: Math.min(rows, count) }, (_, i) => Math.round(i * (count - 1) / Math.max(1, Math.min(rows, count) - 1))))];
  const table = document.createElement("table");
  table.className = "plain";
  const head = table.createTHead().insertRow();
  for (const name of names) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.className = "n";
    cell.textContent = name;
    head.append(cell);
  }
  const body = table.createTBody();
  for (const i of chosen) {
    const row = body.insertRow();
    for (const column of columns) {
      const cell = row.insertCell();
      cell.className = "n";
      cell.textContent = number(column[i]);
    }
  }
  box.replaceChildren(table);
}

export function onTheme(redraw) {
  document.addEventListener("themechange", redraw);
}
