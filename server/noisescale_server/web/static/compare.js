// Runs over each other: one colour a run, solid for the noise scale and dashed for its batch.
import { number } from "./format.js";
import { startLive } from "./live.js";
import { axis, band, colour, draw, endLabels, fillTable, onTheme, savePng, logAxis, roomFor, spacious } from "./plots.js";

const names = [...document.querySelectorAll("#compared [data-run]")].map((span) => span.dataset.run);
const base = location.pathname.replace(/\/compare\/?$/, "");
const plot = document.getElementById("plot-compare");
const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
let runs = [];

const over = (values, batches) => values.map((value, i) => (value > 0 && batches[i] ? value / batches[i] : null));

function show() {
  const ratio = chosen("y") === "ratio";
  const drawn = runs.map(({ points: p }) => {
    const by = (column) => (ratio ? column.map((v, i) => (v === null ? null : v / p.global_batch_size[i])) : column);
    return { x: p[chosen("x")], value: by(p.noise_scale), lower: by(p.lower), upper: by(p.upper), batch: p.global_batch_size };
  });
  const known = runs.flatMap((run, i) => (ratio ? over(run.points.noise_scale, run.points.global_batch_size).filter(Boolean).concat(1) : run.limits ?? []));
  if (!known.length) return;
  const limits = [Math.min(...known) / (ratio ? 1.5 : 1), Math.max(...known) * (ratio ? 1.5 : 1)];
  const traces = drawn.flatMap((d, i) => [
    ...band(d.x, d.lower, d.upper, limits, `series-${i}`),
    ...(ratio ? [] : [{ x: d.x, y: d.batch, type: "scatter", mode: "lines", hoverinfo: "skip", line: { color: colour(`series-${i}`), width: 1.5, dash: "dash", shape: "hv" } }]),
    { x: d.x, y: d.value.map((v) => (v > 0 ? v : null)), type: "scatter", mode: "lines", line: { color: colour(`series-${i}`), width: 2.25 }, text: d.value.map(number), hovertemplate: `${names[i]}: %{text}<extra></extra>` },
  ]);
  const wide = spacious(plot);
  const shorten = (name) => (name.length > 22 ? `${name.slice(0, 21)}…` : name);
  const labels = drawn.map((d, i) => ({ value: d.value.findLast((v) => v > 0) ?? 0, text: shorten(names[i]), shade: `series-${i}` }));
  const margin = { l: 56, r: wide ? roomFor(labels) : 12, t: 14, b: 44 };
  const last = Math.max(...drawn.flatMap((d) => d.x), 2);
  const first = Math.max(1, Math.min(...drawn.flatMap((d) => d.x)));
  const title = { text: chosen("x") === "step" ? "steps" : "examples or tokens", font: { size: 12, color: colour("ink-3") } };
  draw(plot, traces, {
    xaxis: chosen("x-scale") === "log" ? logAxis([first, last], { title }) : axis({ range: [0, last], tickformat: ",~r", showgrid: false, title }),
    yaxis: logAxis(limits, { title: { text: ratio ? "noise scale / batch" : "examples or tokens", font: { size: 12, color: colour("ink-3") } } }),
    shapes: ratio ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: colour("batch"), width: 1.5, dash: "dash" } }] : [],
    annotations: wide ? endLabels(labels, limits, plot.clientHeight - margin.t - margin.b) : [], margin,
  }, `Noise scales: ${runs.map((run) => `${run.run} ${number(run.points.noise_scale.at(-1))}`).join(", ")}`);
  const details = document.querySelector("[data-table]");
  if (details.open) {
    fillTable(details.querySelector(".wide"), ["run", "step", "noise scale", "batch"], transpose(runs.flatMap((run) => sample(run))), 60);
  }
  document.body.dataset.drawn = String(runs.length);
}

const transpose = (rows) => [0, 1, 2, 3].map((place) => rows.map((row) => row[place]));
function sample({ run, points: p }) {
  const stride = Math.max(1, Math.floor(p.step.length / 10));
  return p.step.map((step, i) => [run, step, p.noise_scale[i], p.global_batch_size[i]]).filter((_, i) => i % stride === 0);
}

async function load() {
  runs = await Promise.all(names.map(async (name) => (await fetch(`${base}/runs/${encodeURIComponent(name)}/charts.json?max_points=300`)).json()));
  show();
}

for (const name of ["x", "y", "x-scale"]) {
  for (const input of document.querySelectorAll(`input[name="${name}"]`)) input.addEventListener("change", show);
}
document.addEventListener("toggle", (event) => { if (event.target.matches?.("[data-table]")) show(); }, true);
document.querySelector("[data-png]").addEventListener("click", () => savePng(plot, "compare", "Noise scale"));
document.getElementById("add")?.addEventListener("change", () => document.getElementById("choose").requestSubmit());
onTheme(show);
startLive(load);
load();
