// Keeps a page as fresh as the server's: fetches it again and swaps the parts that differ.
import { tickTimes } from "./parts.js";

const every_ms = 3000;
let etag = null;
let timer = null;
let changed = () => {};

// A region is replaced where its markup differs. Inside it, what a person opened, ticked or
// focused stays so; rows with a fingerprint are replaced one by one.
function swap(old, fresh) {
  const rows = old.querySelector("tbody#rows");
  const freshRows = fresh.querySelector("tbody#rows");
  if (rows && freshRows) return swapRows(old, fresh, rows, freshRows);
  const bare = (node) => node.outerHTML.replace(/(<time[^>]*?)(?: title="[^"]*")?>[^<]*<\/time>/g, "$1></time>").replace(/ open=""/g, "");
  if (bare(old) === bare(fresh)) return false;
  if (old.contains(getSelection().anchorNode) && !getSelection().isCollapsed) return false;
  const focused = old.contains(document.activeElement) ? document.activeElement.id : "";
  const open = [...old.querySelectorAll("details")].map((details) => details.open);
  fresh.querySelectorAll("details").forEach((details, place) => { details.open = open[place] ?? false; });
  old.replaceWith(fresh);
  if (focused) document.getElementById(focused)?.focus();
  return true;
}

function swapRows(old, fresh, rows, freshRows) {
  const known = new Map([...rows.children].map((row) => [row.dataset.key, row]));
  let any = false;
  const wanted = [...freshRows.children].map((row) => {
    const kept = known.get(row.dataset.key);
    if (kept && kept.dataset.fingerprint === row.dataset.fingerprint) return kept;
    any = true;
    if (kept) {
      row.querySelector("input").checked = kept.querySelector("input").checked;
      row.classList.add("fresh");
    }
    return row;
  });
  const sorting = old.querySelector("thead").innerHTML !== fresh.querySelector("thead").innerHTML;
  if (!any && !sorting && wanted.length === rows.children.length && wanted.every((row, place) => row === rows.children[place])) return false;
  const active = rows.contains(document.activeElement) ? document.activeElement : null;
  const key = active?.closest("tr").dataset.key;
  const kind = active?.tagName;
  rows.replaceChildren(...wanted);
  const heads = old.querySelector("thead");
  const freshHeads = fresh.querySelector("thead");
  if (heads.innerHTML !== freshHeads.innerHTML) {
    const place = [...heads.querySelectorAll("a")].indexOf(document.activeElement);
    heads.innerHTML = freshHeads.innerHTML;
    if (place >= 0) heads.querySelectorAll("a")[place].focus();
  }
  if (key) rows.querySelector(`tr[data-key="${CSS.escape(key)}"] ${kind}`)?.focus();
  return true;
}

function say(lost) {
  const line = document.getElementById("live");
  if (!line || line.classList.contains("lost") === lost) return;
  line.classList.toggle("lost", lost);
  line.textContent = lost ? "The server does not answer; trying again" : "Live";
}

export async function refresh(address = location.href) {
  clearTimeout(timer);
  try {
    const answer = await fetch(address, { cache: "no-cache" });
    if (answer.redirected || answer.status === 404) return location.reload(); // signed out, or gone
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    say(false);
    if (answer.headers.get("etag") !== etag) {
      etag = answer.headers.get("etag");
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const region of document.querySelectorAll("[data-live]")) {
        const other = fresh.querySelector(`[data-live="${region.dataset.live}"]`);
        if (other) swap(region, other);
      }
      tickTimes();
      changed();
    }
  } catch {
    say(true);
  }
  timer = setTimeout(poll, every_ms);
}

function poll() {
  if (document.hidden) timer = setTimeout(poll, every_ms);
  else refresh();
}

export function startLive(onChange = () => {}) {
  changed = onChange;
  timer = setTimeout(poll, every_ms);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
}
