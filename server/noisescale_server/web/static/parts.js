// What every page does: times that tick, buttons that copy.
import { ago } from "./format.js";

export function tickTimes(within = document) {
  for (const time of within.querySelectorAll("time[data-ago]")) {
    const text = ago(Date.parse(time.dateTime));
    if (!time.title) time.title = time.textContent;
    if (time.textContent !== text) time.textContent = text;
  }
}

async function copy(button) {
  const source = document.getElementById(button.dataset.copy);
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = "Copied";
  } catch {
    // No clipboard without https: select it, so that one key copies.
    getSelection().selectAllChildren(source);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) copy(button);
});
tickTimes();
setInterval(tickTimes, 1000);
