// ---- pointing -----------------------------------------------------------------------------------------------------------
function hit(px, py) {
  if (px < LEFT || px > width - RIGHT || py < UPPER || py > height - LOWER) return -1;
  const x = ux(px), y = uy(py), edges = P.edges[axis];
  const slackY = (view.y1 - view.y0) / (height - UPPER - LOWER);
  let best = -1;
  for (let i = 0; i < P.count; i++) {
    if (!shown[B.category[i]] || x < edges[B.lower[i]] || x >= edges[B.upper[i]]) continue;
    if (y < P.at[i] - slackY || y > P.at[i] + B.nbytes[i] + slackY) continue;
    if (y >= P.at[i] && y < P.at[i] + B.nbytes[i]) return i;
    if (best < 0 && B.nbytes[i] < slackY * 3) best = i;
  }
  return best;
}
function position(event, canvas) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}
function showTip(canvas, px, py, ...parts) {
  tip.replaceChildren(...parts);
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), stage = $("stage").getBoundingClientRect();
  const down = canvas.getBoundingClientRect().top - stage.top;
  const x = px + 18 + box.width > stage.width ? px - box.width - 14 : px + 16;
  const y = Math.min(down + py + 14, Math.max(4, stage.height - box.height - 6));
  tip.style.transform = `translate(${Math.max(4, x)}px, ${y}px)`;
}
let drag = null;
map.addEventListener("pointerdown", (event) => {
  const [x, y] = position(event, map);
  drag = { x, y, view: { ...view }, moved: false };
  map.setPointerCapture(event.pointerId);
});
map.addEventListener("pointermove", (event) => {
  const [x, y] = position(event, map);
  if (drag) {
    if (Math.abs(x - drag.x) + Math.abs(y - drag.y) > 3) drag.moved = true;
    if (drag.moved) {
      const dx = ((x - drag.x) / (width - LEFT - RIGHT)) * (drag.view.x1 - drag.view.x0);
      const dy = ((y - drag.y) / (height - UPPER - LOWER)) * (drag.view.y1 - drag.view.y0);
      map.classList.add("moving");
      tip.hidden = true;
      look({ x0: drag.view.x0 - dx, x1: drag.view.x1 - dx, y0: drag.view.y0 + dy, y1: drag.view.y1 + dy });
      return;
    }
  }
  const now = hit(x, y);
  if (now >= 0) showTip(map, x, y, heading("b", now), facts(now)); else tip.hidden = true;
  if (now !== hover) { hover = now; redraw(); }
});
map.addEventListener("pointerup", (event) => {
  const [x, y] = position(event, map);
  if (drag && !drag.moved && x >= LEFT && x <= width - RIGHT) pick(hit(x, y), stepAt(ux(x)));
  drag = null;
  map.classList.remove("moving");
});
map.addEventListener("pointercancel", () => { drag = null; map.classList.remove("moving"); });
map.addEventListener("pointerleave", () => { hover = -1; tip.hidden = true; redraw(); });
chart.addEventListener("pointermove", (event) => {
  const [x] = position(event, chart);
  if (x < LEFT || x > width - RIGHT) { tip.hidden = true; return; }
  const s = stepAt(ux(x));
  showTip(chart, x, -150, make("b", step(s)), liveFacts(s));
});
chart.addEventListener("pointerleave", () => { tip.hidden = true; });
chart.addEventListener("click", (event) => {
  const [x] = position(event, chart);
  if (x >= LEFT) pick(picked, stepAt(ux(x)));
});
bands.addEventListener("pointermove", (event) => {
  const [x, y] = position(event, bands), band = bandAt(x, y);
  if (band) showTip(bands, x, y, ...bandFacts(band)); else tip.hidden = true;
});
bands.addEventListener("pointerleave", () => { tip.hidden = true; });
bands.addEventListener("click", (event) => {
  const [x, y] = position(event, bands), band = bandAt(x, y);
  if (!band) return;
  const room = (edge(band.to) - edge(band.from)) * 0.02;
  look({ x0: edge(band.from) - room, x1: edge(band.to) + room });
  if (band.node) { module = band.node; drawModuleTable(); }
});

// ---- moving ------------------------------------------------------------------------------------------------------------
function look(wanted) {
  Object.assign(view, wanted);
  clamp();
  redraw();
}
function zoom(factor, px, py, alongX = true, alongY = true) {
  const x = ux(px), y = uy(py), wanted = {};
  if (alongX) Object.assign(wanted, { x0: x - (x - view.x0) * factor, x1: x + (view.x1 - x) * factor });
  if (alongY) Object.assign(wanted, { y0: y - (y - view.y0) * factor, y1: y + (view.y1 - y) * factor });
  look(wanted);
}
function onWheel(event) {
  event.preventDefault();
  const [x, y] = position(event, event.currentTarget);
  const amount = event.deltaY || event.deltaX, unit = event.deltaMode === 1 ? 20 : 1;
  const only = event.currentTarget !== map;
  zoom(Math.exp(Math.max(-120, Math.min(120, amount * unit)) * 0.0022), x, y, !event.altKey, !event.shiftKey && !only);
}
for (const canvas of [map, chart, bands]) canvas.addEventListener("wheel", onWheel, { passive: false });
map.addEventListener("dblclick", showAll);
bands.addEventListener("dblclick", showAll);

function showAll() {
  look({ x0: 0, x1: endOf(), y0: 0, y1: topOf() });
}
function toPeak() {
  const from = Math.max(0, P.peak - Math.max(8, P.length * 0.06)), to = P.peak + Math.max(8, P.length * 0.06);
  look({ x0: edge(Math.floor(from)), x1: edge(Math.ceil(to)), y0: 0, y1: topOf() });
  pick(picked, P.peak);
}
const centre = (factor) => zoom(factor, (LEFT + width - RIGHT) / 2, (UPPER + height - LOWER) / 2);
function move(dx, dy) {
  const w = (view.x1 - view.x0) * dx, h = (view.y1 - view.y0) * dy;
  look({ x0: view.x0 + w, x1: view.x1 + w, y0: view.y0 + h, y1: view.y1 + h });
}
// Bring an instruction into view.
function show(s) {
  const span = view.x1 - view.x0, x = middleOf(s);
  if (x < view.x0 || x > view.x1) look({ x0: x - span / 2, x1: x + span / 2 });
}
function reveal(i) {
  const spanX = view.x1 - view.x0, spanY = view.y1 - view.y0, from = edge(B.lower[i]), to = edge(B.upper[i]);
  if (to <= view.x0 || from >= view.x1) look({ x0: (from + to - spanX) / 2, x1: (from + to + spanX) / 2 });
  const low = P.at[i], high = low + B.nbytes[i];
  if (high <= view.y0 || low >= view.y1) look({ y0: (low + high - spanY) / 2, y1: (low + high + spanY) / 2 });
}
function pick(i, s) {
  picked = i;
  cursor = Math.max(0, Math.min(P.length - 1, s));
  drawPanels();
  redraw();
}
function setAxis(name) {
  if (name === axis || !P.edges[name]) return;
  const from = P.edges[axis], to = P.edges[name];
  const [x0, x1] = [view.x0, view.x1].map((x) => {  // the same instructions stay in view
    const s = stepAt(x, from), share = (x - from[s]) / Math.max(1e-9, from[s + 1] - from[s]);
    return to[s] + Math.min(1, share) * (to[s + 1] - to[s]);
  });
  axis = name;
  $("axis").textContent = axis === "time" ? "By instruction" : "By time";
  look({ x0, x1 });
}
function toFront(k) {
  if (!plans[k] || plans[k] === P) return;
  P = plans[k];
  B = P.buffers;
  hover = -1;
  drawFront();
  drawLegend();
  search($("search").value);
  pick(-1, P.peak);
}
function drawFront() {
  $("front").textContent = `In front: ${P.label}`;
  if (plans.length > 1)
    document.querySelectorAll(".front").forEach((each, k) => { each.textContent = plans[k] === P ? "In front: " : "Behind: "; });
}
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  readTheme();
  redraw();
}

// ---- the link: what is shown is kept behind the # of the page's address --------------------------------------------------------
const digits = (x) => String(+x.toPrecision(8));
function linked() {
  const told = new URLSearchParams();
  told.set("x", `${digits(view.x0)},${digits(view.x1)}`);
  told.set("y", `${digits(view.y0)},${digits(view.y1)}`);
  if (axis !== "steps") told.set("axis", axis);
  if (P !== plans[0]) told.set("front", plans.indexOf(P));
  if (cursor !== P.peak) told.set("at", cursor);
  if (picked >= 0) told.set("pick", `${B.lower[picked]}@${nameOf(picked)}`);
  if (found) told.set("find", $("search").value);
  const hidden = D.categories.filter((_, c) => !shown[c]);
  if (hidden.length) told.set("hide", hidden.join());
  return `#${told}`;
}
let remembering = 0, written = "";
function remember() {
  clearTimeout(remembering);
  remembering = setTimeout(() => {
    written = linked();
    if (written !== location.hash) history.replaceState(null, "", written);
  }, 200);
}
function restore() {
  const told = new URLSearchParams(location.hash.slice(1));
  if (![...told].length || location.hash === written) return;
  toFront(Number(told.get("front") || 0));
  setAxis(told.get("axis") || "steps");
  const hidden = (told.get("hide") || "").split(",");
  D.categories.forEach((category, c) => { shown[c] = !hidden.includes(category); });
  drawLegend();
  search(told.get("find") || "");
  const [first, ...rest] = (told.get("pick") || "").split("@"), name = rest.join("@");
  let wanted = -1;
  for (let i = 0; name && i < P.count; i++) if (B.lower[i] === Number(first) && nameOf(i) === name) wanted = i;
  pick(wanted, told.has("at") ? Number(told.get("at")) || 0 : P.peak);
  const [x0, x1] = (told.get("x") || "").split(",").map(Number), [y0, y1] = (told.get("y") || "").split(",").map(Number);
  if (x1 > x0) look({ x0, x1 });
  if (y1 > y0) look({ y0, y1 });
}

// ---- keys and buttons --------------------------------------------------------------------------------------------------------
const preferred = window.matchMedia("(prefers-color-scheme: dark)");
preferred.addEventListener("change", () => setTheme(preferred.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("search").addEventListener("input", (event) => search(event.target.value));
$("reset").addEventListener("click", showAll);
$("topeak").addEventListener("click", toPeak);
$("zoomin").addEventListener("click", () => centre(0.7));
$("zoomout").addEventListener("click", () => centre(1 / 0.7));
const otherAxis = () => setAxis(axis === "steps" ? "time" : "steps");
const otherPlan = () => toFront((plans.indexOf(P) + 1) % plans.length);
$("axis").addEventListener("click", otherAxis);
$("front").addEventListener("click", otherPlan);
$("axis").hidden = !plans.every((p) => p.edges.time);
$("front").hidden = plans.length < 2;
drawFront();
document.addEventListener("keydown", (event) => {
  if (event.target === $("search")) {
    if (event.key === "Escape") { search(""); event.target.blur(); }
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = {
    "/": () => $("search").focus(), p: toPeak, "0": showAll, "+": () => centre(0.7), "=": () => centre(0.7),
    "-": () => centre(1 / 0.7), t: otherAxis, o: otherPlan, ArrowLeft: () => move(-0.15, 0),
    ArrowRight: () => move(0.15, 0), ArrowUp: () => move(0, 0.15), ArrowDown: () => move(0, -0.15),
    Escape: () => { toModule(0); pick(-1, P.peak); },
  };
  const action = keys[event.key];
  if (!action) return;
  if (event.key.startsWith("Arrow") && document.activeElement !== map) return;
  event.preventDefault();
  action();
});
drawLegend();
drawNotes();
drawPanels();
setTheme(preferred.matches ? "dark" : "light");
restore();
window.addEventListener("hashchange", restore);
new ResizeObserver(resize).observe($("stage"));
resize();
