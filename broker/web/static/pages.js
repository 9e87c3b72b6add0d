// Only comfort: every page works without it. Times in the local zone, selects that submit, an overview that keeps up.
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
