// The planner: whatever is typed goes into the address, and the server works it out.
import { drawCurve } from "./curve.js";
import { onTheme } from "./plots.js";
import "./parts.js";

const form = document.getElementById("plan");
const said = document.getElementById("said");
const edited = new Set(new URLSearchParams(location.search).keys());
let asked = 0;

function address() {
  const query = new URLSearchParams();
  for (const field of form.elements) {
    if (field.name && field.value.trim() && (edited.has(field.name) || field.name === "run")) query.set(field.name, field.value.trim());
  }
  return `?${query}`;
}

function curve() {
  const plot = document.getElementById("plot-plan");
  if (!plot) return;
  const shown = JSON.parse(plot.dataset.curve);
  if (shown) drawCurve(plot, shown, unit(), "plan");
}

const unit = () => (document.getElementById("title-plan").textContent.endsWith("tokens") ? "tokens" : "examples");

function press() {
  for (const chip of document.querySelectorAll("[data-set]")) {
    const on = Object.entries(JSON.parse(chip.dataset.set)).every(([name, value]) => Number(form.elements[name].value) === value);
    chip.setAttribute("aria-pressed", String(on));
  }
}

async function work() {
  const turn = ++asked;
  const answer = document.getElementById("answer");
  answer.classList.add("waiting");
  history.replaceState(null, "", address());
  let page;
  try {
    const reply = await fetch(location.href, { cache: "no-cache" });
    if (reply.redirected) return location.reload();
    page = new DOMParser().parseFromString(await reply.text(), "text/html");
  } catch {
    said.textContent = "The server does not answer";
    return;
  }
  if (turn !== asked) return; // something else was typed meanwhile
  const open = answer.querySelector("details")?.open;
  answer.replaceWith(page.getElementById("answer"));
  const details = document.querySelector("#answer details");
  if (details && open) details.open = true;
  for (const problem of document.querySelectorAll("[data-error]")) {
    const text = page.querySelector(`[data-error="${problem.dataset.error}"]`)?.textContent ?? "";
    problem.textContent = text;
    form.elements[problem.dataset.error].toggleAttribute("aria-invalid", Boolean(text));
    if (text) form.elements[problem.dataset.error].setAttribute("aria-invalid", "true");
  }
  const result = document.getElementById("result");
  for (const [name, value] of Object.entries(JSON.parse(result.dataset.effective ?? "{}"))) {
    if (!edited.has(name)) form.elements[name].value = value;
  }
  const batch = document.getElementById("plan-batch");
  said.textContent = batch
    ? `Batch ${batch.textContent}, learning rate ${document.getElementById("plan-rate").textContent}, steps ${document.getElementById("plan-steps").textContent}`
    : result.textContent.trim();
  press();
  curve();
  document.body.dataset.worked = location.search;
}

let typing = null;
form.addEventListener("input", (event) => {
  if (event.target.name === "run") return;
  edited.add(event.target.name);
  clearTimeout(typing);
  typing = setTimeout(work, 120);
});
form.elements.run.addEventListener("change", () => { location.search = form.elements.run.value ? `?run=${encodeURIComponent(form.elements.run.value)}` : ""; });
form.addEventListener("submit", (event) => { event.preventDefault(); work(); });
document.addEventListener("click", (event) => {
  const chip = event.target.closest("[data-set]");
  if (!chip) return;
  for (const [name, value] of Object.entries(JSON.parse(chip.dataset.set))) {
    form.elements[name].value = value;
    edited.add(name);
  }
  work();
});
onTheme(curve);
press();
curve();
document.body.dataset.worked = location.search;
