// Only comfort: every page works without it. Times in the local zone, selects that submit, tables that
// are sorted by a column, an overview that keeps up.
"use strict";

const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
let local = false;
try {
  local = localStorage.getItem("postdate.zone") === "local";
} catch {
  // Storage is switched off: times stay UTC.
}

function pad(value, width = 2) {
  return String(value).padStart(width, "0");
}

function localText(date, precision) {
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  const minutes = `${pad(date.getHours())}:${pad(date.getMinutes())}`;
  if (precision === "minutes") return `${day} ${minutes}`;
  const seconds = `${minutes}:${pad(date.getSeconds())}`;
  return `${day} ${precision === "milliseconds" ? `${seconds}.${pad(date.getMilliseconds(), 3)}` : seconds}`;
}

function showTimes() {
  for (const time of document.querySelectorAll("time")) {
    time.dataset.utc ??= time.innerHTML;
    const date = new Date(time.dateTime);
    if (local) time.textContent = localText(date, time.dataset.precision);
    else time.innerHTML = time.dataset.utc;
    time.title = local ? time.dateTime : date.toLocaleString();
  }
  const button = document.getElementById("zone");
  if (!button) return;
  button.hidden = false;
  button.textContent = local ? "Local time" : "UTC";
  button.title = local ? `Times are shown in ${zone}; charts and forms are in UTC` : `Show times in ${zone}`;
  document.getElementById("zone-note").textContent = local ? `, shown here in ${zone}` : "";
}

document.getElementById("zone")?.addEventListener("click", () => {
  local = !local;
  try {
    localStorage.setItem("postdate.zone", local ? "local" : "utc");
  } catch {
    // It holds for this page.
  }
  showTimes();
});

for (const select of document.querySelectorAll("select[data-submit]")) {
  select.addEventListener("change", () => select.form.requestSubmit());
  for (const button of select.form.querySelectorAll("button:not([name])")) button.hidden = true;
}

// On a phone the pages' names are wider than the screen: the present one is brought into sight.
const here = document.querySelector(".top nav [aria-current]");
if (here) here.parentElement.scrollLeft = here.offsetLeft - here.parentElement.offsetLeft - 40;

// A column's name sorts the rows that a table shows by it, a second time the other way round.
const UNITS = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, M: 1e6, G: 1e9, T: 1e12,
  ms: 1, s: 1e3, min: 6e4, h: 3.6e6, d: 8.64e7 };
// Linear in the text, which whoever produces may have chosen: each further part has to begin with a space.
const AMOUNT = /^(?:in )?(?:≤ ?)?[\d,.]+(?: ?(?:[KMGT]iB|[BMGTshd]|ms|min))?(?: [\d,.]+ (?:d|h|min|s))*(?: ago)?$/;

function sortKey(cell) {
  const text = cell.dataset.sort ?? cell.querySelector("time")?.dateTime ?? cell.textContent.trim();
  if (!AMOUNT.test(text)) return text;
  const parts = text.matchAll(/([\d,.]+) ?([A-Za-z]+)?/g);
  const sum = [...parts].reduce((all, [, count, unit]) => all + count.replaceAll(",", "") * (UNITS[unit] ?? 1), 0);
  return text.endsWith("ago") ? -sum : sum;
}

function compareKeys(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a !== typeof b) return typeof a === "number" ? 1 : -1; // what has no value comes first
  return a.localeCompare(b, undefined, { numeric: true });
}

function sortRows(table, head) {
  const isUp = head.ariaSort ? head.ariaSort === "descending" : !head.classList.contains("n");
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = isUp ? "ascending" : "descending";
  const rows = [...table.tBodies[0].rows].map((row) => [sortKey(row.cells[head.cellIndex]), row]);
  rows.sort(([a], [b]) => (isUp ? compareKeys(a, b) : compareKeys(b, a)));
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

for (const table of document.querySelectorAll("main table:not(#live table)")) {
  if (!table.tHead || table.tBodies[0].rows.length < 2) continue;
  for (const head of table.tHead.rows[0].cells) {
    if (head.querySelector(".hide")) continue; // of buttons
    const button = document.createElement("button");
    button.className = "sort";
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sortRows(table, head));
    head.append(button);
  }
}

const live = document.getElementById("live");
if (live) {
  const away = document.createElement("p");
  away.className = "flash failed";
  away.role = "status";
  away.textContent = "The broker does not answer. What is shown is what it said last.";
  setInterval(async () => {
    if (document.hidden || live.contains(document.activeElement)) return;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      // The login has ended, or a right was withdrawn: what may not be seen any more goes.
      if (answer.redirected || answer.status === 403) return location.reload();
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.getElementById("live");
      if (!answer.ok || !fresh) throw new Error("not the page");
      live.replaceChildren(...fresh.childNodes);
      away.remove();
      showTimes();
    } catch {
      // What is shown stays, but nobody shall take it for how things are.
      live.before(away);
    }
  }, Number(live.dataset.refresh) * 1000);
}

showTimes();
