// The list: searches as you type, sorts in place, counts what is ticked for comparing.
import { refresh, startLive } from "./live.js";

const find = document.getElementById("find");
const compare = document.getElementById("compare");
const button = document.getElementById("compare-button");
const most = Number(compare.dataset.most);

function count() {
  const boxes = [...compare.querySelectorAll("input[type=checkbox]")];
  const ticked = boxes.filter((box) => box.checked).length;
  for (const box of boxes) box.disabled = ticked >= most && !box.checked;
  button.textContent = ticked ? `Compare ${ticked}` : "Compare";
  button.disabled = ticked === 0;
}

function show(address) {
  history.replaceState(null, "", address);
  return refresh();
}

let typing = null;
find.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    const query = new URLSearchParams(location.search);
    const text = find.elements.q.value.trim();
    if (text) query.set("q", text);
    else query.delete("q");
    show(`?${query}`);
  }, 150);
});
find.addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("click", (event) => {
  const link = event.target.closest("#list thead a, #chips a");
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  show(link.getAttribute("href"));
});
compare.addEventListener("change", count);
startLive(count);
count();
