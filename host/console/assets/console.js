// Times in the reader's zone, changes, and keys. Pages work without this file.
"use strict";
(() => {
  const local = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

  const localize = (root) => {
    for (const time of root.querySelectorAll("time[datetime]")) {
      const text = local.format(new Date(time.dateTime));
      if (time.textContent !== text) time.textContent = text;
    }
  };
  localize(document);

  // What is kept for the next page.
  const kept = (name, fallback) => localStorage.getItem(name) ?? fallback;

  const live = document.getElementById("live");
  if (live) {
    new MutationObserver(() => localize(live)).observe(live, { childList: true, subtree: true, characterData: true });

    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet follow";
    const isPaused = () => kept("changes", "followed") === "paused";
    const label = () => { button.textContent = isPaused() ? "Follow changes" : "Pause changes"; };
    button.addEventListener("click", () => {
      localStorage.setItem("changes", isPaused() ? "followed" : "paused");
      label();
    });
    label();
    live.before(button);

    // Nothing changes under the reader's hands: changes wait until they are away.
    const isHeld = () => isPaused() || live.contains(document.activeElement) || live.querySelector("details[open]");
    let waiting = [];
    const release = () => {
      if (isHeld()) return;
      waiting.forEach((go) => go());
      waiting = [];
    };
    live.addEventListener("htmx:sse:before:message", ({ detail }) => {
      if (isHeld()) detail.waitUntil(new Promise((go) => waiting.push(go)));
    });
    for (const kind of ["focusout", "toggle", "click"]) document.addEventListener(kind, () => setTimeout(release), true);

    // A page that nobody sees takes no connection.
    const follow = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", follow);
      live.setAttribute("hx-sse:connect", live.dataset.follow);
      htmx.process(live);
    };
    document.addEventListener("visibilitychange", follow);
    follow();
  }

  const rows = () => [...document.querySelectorAll("tbody tr")].filter((row) => row.querySelector("a"));
  const move = (step) => {
    const all = rows();
    if (!all.length) return;
    const at = all.findIndex((row) => row.contains(document.activeElement));
    const next = all[Math.min(all.length - 1, Math.max(0, at < 0 ? 0 : at + step))];
    next.querySelector("a").focus();
  };

  const keys = document.getElementById("keys");
  const areUsed = document.getElementById("use-keys");
  areUsed.checked = kept("keys", "used") === "used";
  areUsed.addEventListener("change", () => localStorage.setItem("keys", areUsed.checked ? "used" : "unused"));
  const opener = document.createElement("button");
  opener.type = "button";
  opener.className = "quiet";
  opener.textContent = "Keys";
  opener.addEventListener("click", () => keys.showModal());
  document.querySelector("header").append(opener);

  let isGoing = false;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || keys.open) return;
    if (event.target.closest("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (!areUsed.checked) return;
    if (isGoing) {
      isGoing = false;
      const link = document.querySelector(`nav a[data-key="g ${CSS.escape(event.key)}"]`);
      if (link) link.click();
      return;
    }
    const above = document.querySelectorAll(".above a");
    switch (event.key) {
      case "?": keys.showModal(); break;
      case "/": document.querySelector("main :is(input:not([type=hidden]), select, textarea)")?.focus(); break;
      case "j": move(1); break;
      case "k": move(-1); break;
      case "u": (above[above.length - 1] ?? document.querySelector(".home")).click(); break;
      case "g": isGoing = true; break;
      default: return;
    }
    event.preventDefault();
  });
})();
