// The efficiency curve: where a batch is on it, and where another one would be.
import { exact, number } from "./format.js";
import { axis, colour, draw, faded } from "./plots.js";

const unit = { examples: "examples", tokens: "tokens" };

export function drawCurve(plot, curve, batchUnit, thenName) {
  if (!curve) {
    plot.setAttribute("aria-label", "Efficiency curve: the noise scale has no lower end yet");
    return Promise.resolve();
  }
  const spots = [curve.now, ...(curve.then ? [curve.then] : [])];
  const line = curve.line.filter((spot) => spot.examples < 30 && spot.steps < 30 || spots.some((s) => s.global_batch_size === spot.global_batch_size));
  const text = (spot) => `batch ${exact(spot.global_batch_size)}: ${number(spot.steps)}× the steps, ${number(spot.examples)}× the ${unit[batchUnit]}`;
  const traces = [{
    x: line.map((s) => s.examples), y: line.map((s) => s.steps), type: "scatter", mode: "lines",
    line: { color: colour("ink-3"), width: 2 }, text: line.map(text), hovertemplate: "%{text}<extra></extra>",
  }];
  if (curve.range.length) {
    const [from, to] = curve.range.map((s) => s.examples).sort((a, b) => a - b);
    const steps = Array.from({ length: 40 }, (_, i) => from * (to / from) ** (i / 39));
    traces.push({
      x: steps, y: steps.map((e) => 1 + 1 / (e - 1)), type: "scatter", mode: "lines", hoverinfo: "skip",
      line: { color: faded("batch", .3), width: 11 },
    });
  }
  const mark = (spot, shade, name, position) => ({
    x: [spot.examples], y: [spot.steps], type: "scatter", mode: "markers+text",
    marker: { size: 12, color: colour(shade), line: { color: colour("surface"), width: 2 } },
    text: [name], textposition: position, textfont: { color: colour(shade === "batch" ? "batch-ink" : "good-ink"), size: 12, weight: 600 },
    cliponaxis: false, hovertemplate: `${text(spot)}<extra></extra>`,
  });
  traces.push(mark(curve.now, "batch", `now ${exact(curve.now.global_batch_size)}`, "top right"));
  if (curve.then && curve.then.global_batch_size !== curve.now.global_batch_size) {
    traces.push(mark(curve.then, "good", `${thenName} ${exact(curve.then.global_batch_size)}`, "top right"));
  }
  const far = (of) => Math.log10(Math.max(3.2, ...line.map(of), ...spots.map(of)) * 1.15);
  const ticks = [1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000];
  const ratios = (title, top) => axis({
    type: "log", range: [-0.02, top], tickvals: ticks, ticktext: ticks.map((t) => `${t}×`), title: { text: title, font: { size: 12, color: colour("ink-3") }, standoff: 10 },
  });
  const label = `Efficiency curve at a noise scale of ${number(curve.noise_scale)}. Now, ${text(curve.now)}.`
    + (curve.then ? ` ${thenName}, ${text(curve.then)}.` : "");
  return draw(plot, traces, {
    hovermode: "closest",
    xaxis: ratios(`${unit[batchUnit]}, over the least`, far((s) => s.examples)),
    yaxis: ratios("steps, over the fewest", far((s) => s.steps)),
    margin: { l: 56, r: 24, t: 20, b: 48 },
  }, label);
}
