// Keeps the figures fresh while the page is open. Without it everything is there, as of loading.
"use strict";
(() => {
  const lamp = document.getElementById("link");
  const text = document.getElementById("link-text");
  if (!window.EventSource || !lamp) return;
  let version = null;
  let refreshed = Date.now();

  // Parts are exchanged whole, unless somebody is in one of them right now.
  const refresh = async () => {
    refreshed = Date.now();
    const parts = document.querySelectorAll("[data-fresh]");
    if (!parts.length) return;
    const reply = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (!reply.ok) return;
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    for (const part of parts) {
      const fresh = page.getElementById(part.id);
      const busy = part.contains(document.activeElement) || part.querySelector("details[open]");
      if (fresh && !busy) part.replaceWith(document.adoptNode(fresh));
    }
  };

  // Whether alarms or a pause came or went; those who do not look are told.
  let trouble = null;
  const troubled = (values) => {
    const before = trouble;
    const paused = "state" in values ? values.state === "paused" : before && before.paused;
    trouble = { alarms: "alarms" in values ? values.alarms : before && before.alarms, paused };
    if (before && before.alarms === trouble.alarms && before.paused === paused) return false;
    const said = document.getElementById("said");
    if (before && said) said.textContent = `Alarms: ${trouble.alarms}.${paused ? " The run is paused." : ""}`;
    return true;
  };

  const show = (event) => {
    const values = JSON.parse(event.data);
    for (const [name, value] of Object.entries(values)) {
      for (const place of document.querySelectorAll(`[data-live="${name}"]`)) {
        if (place.textContent === value) continue;
        place.textContent = value;
        if (name === "now") continue;
        place.classList.add("fresh");
        setTimeout(() => place.classList.remove("fresh"), 300);
      }
    }
    const now = troubled(values);
    const changed = "version" in values && version !== null && values.version !== version;
    if ("version" in values) version = values.version;
    if (changed || now || Date.now() - refreshed > 15000) refresh().catch(() => {});
  };

  // A browser comes again by itself when a line breaks, but never after a reply that is no stream: a proxy's
  // 502 while the coordinator starts again, our 503 to one viewer too many.
  let source = null;
  let again = 0;
  let wait = 5000;
  const stop = () => { clearTimeout(again); if (source) source.close(); source = null; };
  const lost = () => {
    lamp.hidden = false;
    lamp.classList.add("lost");
    text.textContent = "connection lost, trying again";
    if (!source || source.readyState !== EventSource.CLOSED) return;
    again = setTimeout(start, wait * (1 + Math.random() / 2));
    wait = Math.min(2 * wait, 60000);
  };
  const start = () => {
    stop();
    source = new EventSource("/live");
    source.onopen = () => { wait = 5000; lamp.hidden = false; lamp.classList.remove("lost"); text.textContent = "live"; };
    source.onerror = lost;
    source.addEventListener("values", show);
  };
  // A browser keeps pages that were left, with their connections, and allows six to one host.
  addEventListener("pagehide", stop);
  addEventListener("pageshow", start);
})();
