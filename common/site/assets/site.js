// The controls of the pages. The address keeps their state after "#".
"use strict";
const all = (selector) => [...document.querySelectorAll(selector)];
const kept = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
function keep(name, value) {
  kept.set(name, value);
  history.replaceState(null, "", "#" + kept);
}

// These buttons choose the pass of the step, forward or backward.
const shows = all("[data-show]");
function show(pass) {
  for (const button of shows) button.setAttribute("aria-pressed", String(button.dataset.show === pass));
  for (const part of all("[data-pass]")) part.hidden = part.dataset.pass !== pass;
}
if (shows.length) {
  const first = shows.some((button) => button.dataset.show === kept.get("pass")) ? kept.get("pass") : shows[0].dataset.show;
  show(first);
  for (const button of shows) button.onclick = () => { show(button.dataset.show); keep("pass", button.dataset.show); };
}

// The slider chooses a time in the traces. A veil hides later accesses. Both stages have one time scale.
const time = document.getElementById("time");
if (time) {
  const traces = all(".panel:not(.zoomed)");
  const now = document.getElementById("now");
  const draw = () => {
    const share = time.value / 1000;
    for (const panel of traces) panel.querySelector(".veil").style.left = 100 * share + "%";
    const panel = traces.find((each) => each.offsetParent) ?? traces[0];
    now.value = (panel.dataset.end * share).toFixed(panel.dataset.end < 1000 ? 2 : 0) + " " + panel.dataset.unit;
  };
  if (kept.has("time")) time.value = kept.get("time");
  draw();
  time.oninput = () => { stop(); draw(); };
  time.onchange = () => keep("time", time.value);
  const play = document.getElementById("play");
  let running = 0;
  function stop() { cancelAnimationFrame(running); running = 0; play.textContent = "Play"; }
  play.onclick = () => {
    if (running) { stop(); keep("time", time.value); return; }
    const from = time.value >= 1000 ? 0 : +time.value, began = performance.now();
    play.textContent = "Pause";
    const step = (moment) => {
      time.value = Math.min(1000, from + (moment - began) / 8);
      draw();
      if (time.value < 1000) running = requestAnimationFrame(step);
      else { stop(); keep("time", 1000); }
    };
    running = requestAnimationFrame(step);
  };
  for (const button of shows) button.addEventListener("click", draw);
}

// Above a picture, table or code that goes on to the left or right, a hint says so. The edge on that side fades.
for (const part of all(".scroll, .field, .text table, .text pre")) {
  const hint = document.createElement("p");
  hint.className = "hint";
  hint.setAttribute("aria-hidden", "true");
  (part.closest(".lanes") ?? part).before(hint);
  const draw = () => {
    const left = part.scrollLeft > 1, right = part.scrollLeft + part.clientWidth < part.scrollWidth - 1;
    part.classList.toggle("more-left", left);
    part.classList.toggle("more-right", right);
    hint.textContent = (left ? "← " : "") + (left || right ? "scroll" : "") + (right ? " →" : "");
  };
  part.addEventListener("scroll", draw);
  addEventListener("drawn", draw);
  const sizes = new ResizeObserver(draw);
  for (const each of [part, ...part.children]) sizes.observe(each);
}

const zoom = document.getElementById("zoom");
if (zoom) {
  const thin = () => {  // hide numbers of the time axis that would lie on others
    for (const ticks of all(".ticks")) {
      const step = ticks.clientWidth * parseFloat(ticks.children[1]?.style.left) / 100;  // NaN if there is one tick
      const every = step ? Math.ceil(50 / step) : 1;
      [...ticks.children].forEach((tick, place) => { tick.hidden = place % every > 0; });
    }
  };
  const draw = () => { zoom.closest("section").style.setProperty("--zoom", zoom.value); thin(); };
  addEventListener("resize", thin);
  if (kept.has("zoom")) zoom.value = kept.get("zoom");
  draw();
  zoom.oninput = draw;
  zoom.onchange = () => keep("zoom", zoom.value);
  const fields = all(".zoomed .field");  // parent and stage scroll together
  const middle = () => { for (const field of fields) field.scrollLeft = field.scrollWidth / 2 - field.clientWidth / 2; };
  middle();
  for (const button of shows) button.addEventListener("click", () => { thin(); middle(); });
  for (const field of fields) field.onscroll = () => { for (const other of fields) other.scrollLeft = field.scrollLeft; };
}

// A button shows or hides equal lines of the code.
for (const bar of all(".fold .bar button")) {
  const fold = bar.closest("tbody");
  bar.setAttribute("aria-expanded", "false");
  bar.onclick = () => bar.setAttribute("aria-expanded", String(!fold.classList.toggle("open") ? false : true));
}

// The box shows a term's definition on hover and focus, or the words of a mark in a picture.
const box = document.body.appendChild(document.createElement("div"));
box.id = "box";
box.setAttribute("role", "tooltip");
function say(fill, x, y) {
  fill(box);
  box.classList.add("on");
  box.style.left = Math.max(8, Math.min(x, innerWidth - box.offsetWidth - 8)) + "px";
  box.style.top = (y + box.offsetHeight + 12 > innerHeight ? y - box.offsetHeight - 12 : y + 12) + "px";
}
const hush = () => box.classList.remove("on");
const terms = JSON.parse(document.getElementById("terms")?.textContent ?? "{}");
for (const term of all("[data-term]")) {
  const open = () => {
    const place = term.getBoundingClientRect();
    term.setAttribute("aria-describedby", "box");
    say((into) => { into.innerHTML = terms[term.dataset.term]; }, place.left, place.bottom - 8);
  };
  term.onmouseenter = term.onfocus = open;
  term.onmouseleave = term.onblur = () => { term.removeAttribute("aria-describedby"); hush(); };
}
for (const lanes of all(".lanes")) {
  lanes.onmousemove = (event) => {
    const words = event.target.dataset?.words;
    if (words) say((into) => { into.textContent = words; }, event.clientX, event.clientY);
    else hush();
  };
  lanes.onmouseleave = hush;
}

addEventListener("keydown", (event) => {
  if (event.key === "Escape") hush();
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select, .scroll, .field")) return;
  const rel = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  document.querySelector(`a[rel=${rel}]`)?.click();
});
