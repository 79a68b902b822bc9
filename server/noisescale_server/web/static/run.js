// One run's page: draws its charts, and again whenever the run has got on.
import { drawCurve } from "./curve.js";
import { exact, interval, number } from "./format.js";
import { startLive } from "./live.js";
import { axis, band, colour, draw, endLabels, faded, fillTable, onTheme, savePng, logAxis, roomFor, spacious } from "./plots.js";

const here = location.pathname.replace(/\/$/, "");
const run = decodeURIComponent(here.split("/").pop());
const plot = (name) => document.getElementById(`plot-${name}`);
let charts = null;
let drawnVersion = null;

const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
const version = () => document.getElementById("fingerprint").dataset.version;
const unitName = () => (chosen("x") === "step" ? "steps" : charts.batch_unit);

function xAxis() {
  const x = charts.points[chosen("x")];
  const log = chosen("x-scale") === "log";
  const first = Math.max(1, Math.min(...x));
  const last = Math.max(first * 1.01, ...x);
  if (log) return logAxis([first, last], { title: { text: unitName(), font: { size: 12, color: colour("ink-3") } } });
  return axis({ range: [0, last], tickformat: ",~r", showgrid: false, title: { text: unitName(), font: { size: 12, color: colour("ink-3") } } });
}

// Vertical lines where the batch or the rate jumped or the job was started again.
const symbols = { batch: "diamond", learning_rate: "triangle-down", restart: "circle" };
function markers(top) {
  const changes = charts.changes;
  const x = changes.map((change) => Math.max(chosen("x-scale") === "log" ? 1 : 0, change[chosen("x")]));
  return {
    shapes: x.map((at) => ({ type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", line: { color: colour("line-2"), width: 1, dash: "dot" }, layer: "below" })),
    trace: {
      x, y: x.map(() => top), type: "scatter", mode: "markers", cliponaxis: false,
      marker: { symbol: changes.map((change) => symbols[change.kind]), size: 8, color: colour("ink-3") },
      text: changes.map((change) => change.text), hovertemplate: "%{text}<extra></extra>",
    },
  };
}

function drawNoiseScale() {
  const at = plot("noise_scale");
  const p = charts.points;
  const x = p[chosen("x")];
  if (!charts.limits || !x.length) return empty(at, "Nothing is measured yet");
  const limits = charts.limits;
  const marks = markers(limits[1]);
  const last = x.length - 1;
  const wide = spacious(at);
  const hover = p.noise_scale.map((value, i) => `<b>${number(value)}</b> (${interval(p.lower[i], p.upper[i])})`);
  const traces = [
    ...band(x, p.lower, p.upper, limits, "noise"),
    { x, y: p.global_batch_size, type: "scatter", mode: "lines", line: { color: colour("batch"), width: 2, shape: "hv" }, text: p.global_batch_size.map(number), hovertemplate: "batch %{text}<extra></extra>" },
    { x, y: p.noise_scale.map((v) => (v > 0 ? v : null)), type: "scatter", mode: "lines", connectgaps: false, line: { color: colour("noise"), width: 2.25 }, text: hover, hovertemplate: "noise scale %{text}<extra></extra>" },
    marks.trace,
  ];
  const labels = [
    { value: p.global_batch_size[last], text: `batch ${exact(p.global_batch_size[last])}`, shade: "batch-ink" },
    { value: p.noise_scale[last] ?? 0, text: `noise scale ${number(p.noise_scale[last])}`, shade: "noise" },
  ];
  const shapes = [...marks.shapes];
  if (charts.recommended_batch_size) {
    const size = charts.recommended_batch_size;
    shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: size, y1: size, line: { color: colour("good"), width: 2, dash: "dash" } });
    labels.push({ value: size, text: `advised ${number(size)}`, shade: "good-ink" });
  }
  const margin = { l: 56, r: wide ? roomFor(labels) : 12, t: 16, b: 44 };
  const height = at.clientHeight - margin.t - margin.b;
  return draw(at, traces, {
    xaxis: xAxis(), yaxis: logAxis(limits, { title: { text: charts.batch_unit, font: { size: 12, color: colour("ink-3") } } }), shapes, margin,
    annotations: wide ? endLabels(labels, limits, height) : inside(labels, limits),
  }, `Noise scale over ${unitName()}: ${number(p.noise_scale[last])} after ${exact(p.step[last])} steps, interval ${interval(p.lower[last], p.upper[last])}; the batch is ${exact(p.global_batch_size[last])}`
    + (charts.recommended_batch_size ? `, advised is ${exact(charts.recommended_batch_size)}` : "") + `. ${charts.changes.length} changes marked.`);
}

// On a narrow screen names stand on their lines and not beside them.
function inside(labels, [low, high]) {
  return labels.filter(({ value }) => value > low && value < high).map(({ value, text, shade }) => ({
    xref: "paper", x: 1, y: Math.log10(value), xanchor: "right", yanchor: "bottom", text, showarrow: false,
    font: { color: colour(shade), size: 11.5, weight: 600 }, bgcolor: faded("surface", .8),
  }));
}

const phases = { warmup: ["warming up", "batch"], lr_decay: ["decaying", "noise"], steady: ["", null] };

function drawLearningRate() {
  const at = plot("learning_rate");
  const p = charts.points;
  const x = p[chosen("x")];
  const rates = p.learning_rate.filter((rate) => rate > 0);
  if (!rates.length) return empty(at, "No learning rate is reported");
  const most = Math.max(...rates);
  const least = Math.min(...rates);
  const log = most / least > 30;
  const marks = markers(log ? most * 1.4 : most * 1.12);
  const which = chosen("x") === "step" ? ["first_step", "last_step"] : ["first_examples", "last_examples"];
  const end = Math.max(...x);
  const shapes = [];
  const annotations = [];
  for (const stretch of charts.stretches) {
    const [name, shade] = phases[stretch.phase];
    if (!shade) continue;
    const [x0, x1] = which.map((key) => stretch[key]);
    shapes.push({ type: "rect", x0, x1, y0: 0, y1: 1, yref: "paper", fillcolor: faded(shade, .1), line: { width: 0 }, layer: "below" });
    if ((x1 - x0) / end > .16 && chosen("x-scale") === "linear") {
      annotations.push({ x: (x0 + x1) / 2, y: .02, yref: "paper", yanchor: "bottom", text: name, showarrow: false, font: { size: 11, color: colour("ink-3") } });
    }
  }
  const traces = [
    { x, y: p.learning_rate, type: "scatter", mode: "lines", line: { color: colour("ink-2"), width: 2 }, text: p.learning_rate.map(number), hovertemplate: "learning rate %{text}<extra></extra>" },
    marks.trace,
  ];
  const range = log ? [Math.log10(least / 1.6), Math.log10(most * 1.6)] : [0, most * 1.18];
  return draw(at, traces, {
    xaxis: xAxis(), yaxis: log ? logAxis(range.map((end) => 10 ** end)) : axis({ range, tickformat: "~g", nticks: 6 }),
    shapes: [...shapes, ...marks.shapes], annotations, margin: { l: 56, r: 16, t: 16, b: 44 },
  }, `Learning rate over ${unitName()}: ${number(p.learning_rate.at(-1))} now, between ${number(least)} and ${number(most)}. `
    + charts.stretches.map((s) => `${phases[s.phase][0] || "steady"} from step ${number(s.first_step)} to ${number(s.last_step)}`).slice(-8).join("; "));
}

function drawMoments() {
  const at = plot("moments");
  const p = charts.points;
  const x = p[chosen("x")];
  const positive = (column) => column.map((value) => (value > 0 ? value : null));
  const trace = positive(p.trace_covariance);
  const signal = positive(p.true_grad_sq_norm);
  const known = [...trace, ...signal].filter((value) => value !== null);
  if (!known.length) return empty(at, "Nothing is measured yet");
  const limits = [Math.min(...known) / 1.8, Math.max(...known) * 1.8];
  const marks = markers(limits[1]);
  const line = (y, shade, name) => ({ x, y, type: "scatter", mode: "lines", line: { color: colour(shade), width: 2 }, text: y.map(number), hovertemplate: `${name} %{text}<extra></extra>` });
  const wide = spacious(at);
  const labels = [{ value: trace.at(-1) ?? 0, text: "tr(Σ)", shade: "ink-2" }, { value: signal.at(-1) ?? 0, text: "|G|²", shade: "noise" }];
  const margin = { l: 60, r: 50, t: 16, b: 44 };
  return draw(at, [line(trace, "ink-2", "tr(Σ)"), line(signal, "noise", "|G|²"), marks.trace], {
    xaxis: xAxis(), yaxis: logAxis(limits),
    shapes: marks.shapes, annotations: endLabels(labels, limits, at.clientHeight - margin.t - margin.b), margin: { ...margin, r: wide ? 54 : 48 },
  }, `tr(Sigma) is ${number(p.trace_covariance.at(-1))} and |G| squared ${number(p.true_grad_sq_norm.at(-1))} now.`);
}

function empty(at, text) {
  return draw(at, [], {
    xaxis: { visible: false }, yaxis: { visible: false },
    annotations: [{ text, showarrow: false, xref: "paper", yref: "paper", x: .5, y: .5, font: { color: colour("ink-3"), size: 13 } }],
  }, text);
}

function listChanges() {
  const box = document.getElementById("changes");
  const list = document.createElement("ul");
  for (const change of charts.changes) {
    const item = document.createElement("li");
    item.textContent = `step ${exact(change.step)}: ${change.text}`;
    list.append(item);
  }
  const title = document.createElement("h3");
  title.textContent = charts.changes_left_out ? `Changes, the last ${charts.changes.length}` : "Changes";
  box.replaceChildren(...(charts.changes.length ? [title, list] : []));
}

function tables() {
  const p = charts.points;
  const columns = {
    noise_scale: [["step", charts.batch_unit, "noise scale", "lower", "upper", "batch"], [p.step, p.examples, p.noise_scale, p.lower, p.upper, p.global_batch_size]],
    learning_rate: [["step", charts.batch_unit, "learning rate"], [p.step, p.examples, p.learning_rate]],
    moments: [["step", charts.batch_unit, "tr(Σ)", "|G|²"], [p.step, p.examples, p.trace_covariance, p.true_grad_sq_norm]],
    efficiency: [["batch", "steps", charts.batch_unit], charts.curve ? ["global_batch_size", "steps", "examples"].map((key) => charts.curve.line.map((s) => s[key])) : [[], [], []]],
  };
  for (const details of document.querySelectorAll("[data-table]")) {
    if (details.open) fillTable(details.querySelector(".wide"), ...columns[details.dataset.table]);
  }
}

async function drawAll() {
  if (!charts) return;
  await Promise.all([drawNoiseScale(), drawLearningRate(), drawMoments(), drawCurve(plot("efficiency"), charts.curve, charts.batch_unit, "advised")]);
  tables();
  listChanges();
  document.body.dataset.drawn = charts.version;
}

async function load() {
  if (!plot("noise_scale")) { // nothing was measured when this page was made
    if (!document.getElementById("waiting")) location.reload();
    return;
  }
  const wanted = version();
  if (wanted === drawnVersion) return;
  drawnVersion = wanted;
  charts = await (await fetch(`${here}/charts.json`)).json();
  await drawAll();
  for (const section of document.querySelectorAll("[data-multiples]")) if (section.dataset.seen) loadMultiples(section);
}

async function loadMultiples(section) {
  const box = section.querySelector(".multiples");
  if (!box) return;
  const by = section.dataset.multiples;
  const found = await (await fetch(`${here}/multiples.json?by=${by}`)).json();
  box.multiples = found;
  drawMultiples(box);
}

function drawMultiples(box) {
  const known = new Map([...box.children].map((child) => [child.dataset.name, child]));
  box.replaceChildren(...box.multiples.map(({ name }) => known.get(name) ?? small(name, name === box.dataset.fitting)));
  for (const { name, points: p, limits } of box.multiples) {
    const child = [...box.children].find((other) => other.dataset.name === name);
    const last = p.step.length - 1;
    child.querySelector("b").textContent = number(p.noise_scale[last]);
    child.querySelector("p").textContent = interval(p.lower[last], p.upper[last]);
    if (!limits) continue;
    draw(child.querySelector(".plot"), [
      ...band(p.step, p.lower, p.upper, limits, "noise"),
      { x: p.step, y: p.global_batch_size, type: "scatter", mode: "lines", line: { color: colour("batch"), width: 1.5, shape: "hv" }, hoverinfo: "skip" },
      { x: p.step, y: p.noise_scale.map((v) => (v > 0 ? v : null)), type: "scatter", mode: "lines", line: { color: colour("noise"), width: 2 }, text: p.noise_scale.map(number), hovertemplate: "%{text}<extra></extra>" },
    ], {
      xaxis: axis({ nticks: 4, tickformat: ",~r", showgrid: false, fixedrange: true }), yaxis: logAxis(limits, { fixedrange: true, small: true }),
      margin: { l: 44, r: 8, t: 8, b: 24 }, dragmode: false,
    }, `Noise scale of ${name}: ${number(p.noise_scale[last])}, interval ${interval(p.lower[last], p.upper[last])}`);
  }
}

const geometryNames = { euclidean: "Euclidean (SGD)", adam: "Adam", sign: "Sign", spectral: "Spectral (Muon)", norm_layers: "Norm layers only" };
function small(name, fitting) {
  const child = document.createElement("figure");
  child.className = `multiple${fitting ? " fitting" : ""}`;
  child.dataset.name = name;
  const title = document.createElement("h3");
  const label = document.createElement("span");
  label.textContent = geometryNames[name] ?? name;
  title.append(label, document.createElement("b"));
  const range = document.createElement("p");
  const chart = document.createElement("div");
  chart.className = "plot";
  chart.setAttribute("role", "img");
  child.append(title, range, chart);
  return child;
}

for (const name of ["x", "x-scale"]) {
  for (const input of document.querySelectorAll(`input[name="${name}"]`)) input.addEventListener("change", drawAll);
}
document.addEventListener("toggle", (event) => { if (event.target.matches?.("[data-table]")) tables(); }, true);
for (const button of document.querySelectorAll("[data-png]")) {
  const title = document.getElementById(`title-${button.dataset.png}`).textContent;
  button.addEventListener("click", () => savePng(plot(button.dataset.png), `${run}-${button.dataset.png}`, `${title} · ${run}`));
}
const watcher = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting || target.dataset.seen) continue;
    target.dataset.seen = "yes";
    loadMultiples(target);
  }
}, { rootMargin: "300px" });
for (const section of document.querySelectorAll("[data-multiples]")) watcher.observe(section);
onTheme(() => {
  drawAll();
  for (const box of document.querySelectorAll(".multiples")) if (box.multiples) drawMultiples(box);
});
startLive(load);
load();
