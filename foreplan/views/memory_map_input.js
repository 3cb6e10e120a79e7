// ---- pointing -----------------------------------------------------------------------------------------------------------
function hit(px, py) {
  if (px < LEFT || px > width - RIGHT || py < UPPER || py > height - LOWER) return -1;
  const x = ux(px), y = uy(py);
  const slackX = (view.x1 - view.x0) / (width - LEFT - RIGHT), slackY = (view.y1 - view.y0) / (height - UPPER - LOWER);
  let best = -1;
  for (let i = 0; i < N; i++) {
    if (!shown[D.category[i]] || x < D.lower[i] || x >= D.upper[i]) continue;
    if (y < base[i] - slackY || y > base[i] + D.nbytes[i] + slackY) continue;
    const inside = y >= base[i] && y < base[i] + D.nbytes[i];
    if (inside) return i;
    if (best < 0 && D.nbytes[i] < slackY * 3) best = i;
  }
  return best;
}
function position(event, canvas) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}
const inSteps = (s) => Math.max(0, Math.min(STEPS - 1, Math.floor(s)));
function showTip(px, py, heading, body) {
  tip.replaceChildren(heading, body);
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), stage = $("stage").getBoundingClientRect();
  const x = px + 18 + box.width > stage.width ? px - box.width - 14 : px + 16;
  const y = Math.min(py + 14, Math.max(4, stage.height - box.height - 6));
  tip.style.transform = `translate(${Math.max(4, x)}px, ${y}px)`;
}
function heading(tag, i) {
  const element = make(tag);
  element.append(swatch(D.category[i]), make("span", nameOf(i)));
  return element;
}
function liveFacts(s) {
  const list = make("dl", undefined, "facts");
  list.append(make("dt", "live"), make("dd", exact(total[s])));
  D.categories.forEach((category, c) => {
    if (live[c][s]) list.append(make("dt", category.replace("_", " ")), make("dd", iec(live[c][s])));
  });
  return list;
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
      Object.assign(view, { x0: drag.view.x0 - dx, x1: drag.view.x1 - dx, y0: drag.view.y0 + dy, y1: drag.view.y1 + dy });
      map.classList.add("moving");
      tip.hidden = true;
      clamp();
      redraw();
      return;
    }
  }
  const now = hit(x, y);
  if (now >= 0) showTip(x, y, heading("b", now), facts(now)); else tip.hidden = true;
  if (now !== hover) { hover = now; redraw(); }
});
map.addEventListener("pointerup", (event) => {
  const [x, y] = position(event, map);
  if (drag && !drag.moved && x >= LEFT && x <= width - RIGHT) pick(hit(x, y), inSteps(ux(x)));
  drag = null;
  map.classList.remove("moving");
});
map.addEventListener("pointercancel", () => { drag = null; map.classList.remove("moving"); });
map.addEventListener("pointerleave", () => { hover = -1; tip.hidden = true; redraw(); });
chart.addEventListener("pointermove", (event) => {
  const [x] = position(event, chart);
  if (x < LEFT || x > width - RIGHT) { tip.hidden = true; return; }
  const s = inSteps(ux(x));
  showTip(x, height - 190, make("b", step(s)), liveFacts(s));
});
chart.addEventListener("pointerleave", () => { tip.hidden = true; });
chart.addEventListener("click", (event) => {
  const [x] = position(event, chart);
  if (x >= LEFT) pick(picked, inSteps(ux(x)));
});
function zoom(factor, px, py, alongX = true, alongY = true) {
  const x = ux(px), y = uy(py);
  if (alongX) { view.x0 = x - (x - view.x0) * factor; view.x1 = x + (view.x1 - x) * factor; }
  if (alongY) { view.y0 = y - (y - view.y0) * factor; view.y1 = y + (view.y1 - y) * factor; }
  clamp();
  redraw();
}
function onWheel(event) {
  event.preventDefault();
  const [x, y] = position(event, event.currentTarget);
  const amount = event.deltaY || event.deltaX, unit = event.deltaMode === 1 ? 20 : 1;
  const only = event.currentTarget === chart;
  zoom(Math.exp(Math.max(-120, Math.min(120, amount * unit)) * 0.0022), x, y, !event.altKey, !event.shiftKey && !only);
}
map.addEventListener("wheel", onWheel, { passive: false });
chart.addEventListener("wheel", onWheel, { passive: false });
map.addEventListener("dblclick", showAll);

function showAll() {
  Object.assign(view, { x0: 0, x1: STEPS, y0: 0, y1: TOP * 1.03 });
  redraw();
}
function toPeak() {
  const half = Math.max(8, STEPS * 0.06);
  Object.assign(view, { x0: D.peak + 0.5 - half, x1: D.peak + 0.5 + half, y0: 0, y1: TOP * 1.03 });
  clamp();
  pick(picked, D.peak);
}
const centre = (factor) => zoom(factor, (LEFT + width - RIGHT) / 2, (UPPER + height - LOWER) / 2);
function search(text) {
  query = text.trim().toLowerCase();
  found = null;
  if (query) {
    found = new Set();
    for (let i = 0; i < N; i++) if (nameOf(i).toLowerCase().includes(query)) found.add(i);
  }
  $("matches").textContent = found ? `${number.format(found.size)} of ${number.format(N)}` : "";
  redraw();
}
function reveal(i) {
  const spanX = view.x1 - view.x0, spanY = view.y1 - view.y0;
  if (D.upper[i] <= view.x0 || D.lower[i] >= view.x1) {
    view.x0 = (D.lower[i] + D.upper[i] - spanX) / 2; view.x1 = view.x0 + spanX;
  }
  if (base[i] + D.nbytes[i] <= view.y0 || base[i] >= view.y1) {
    view.y0 = base[i] + (D.nbytes[i] - spanY) / 2; view.y1 = view.y0 + spanY;
  }
  clamp();
}

// ---- panels ----------------------------------------------------------------------------------------------------------------
function pick(i, s) {
  picked = i;
  cursor = s;
  drawPanels();
  redraw();
}
function drawPanels() {
  const left = $("picked");
  if (picked >= 0) left.replaceChildren(heading("h2", picked), facts(picked));
  else left.replaceChildren(make("h2", step(cursor)), liveFacts(cursor));
  const alive = bySize.filter((i) => D.lower[i] <= cursor && cursor < D.upper[i]), most = 60;
  const where = cursor === D.peak ? "the peak, " : "";
  const body = make("tbody");
  for (const i of alive.slice(0, most)) {
    const row = make("tr", undefined, i === picked ? "on" : "");
    const name = make("td"), box = make("span", undefined, "name");
    box.append(swatch(D.category[i]), make("span", nameOf(i)));
    name.append(box);
    const producer = D.producer[i] >= 0 ? D.producers[D.producer[i]] : "";
    row.append(name, make("td", shapeOf(i), "quiet"), make("td", iec(D.nbytes[i]), "bytes"),
      make("td", `[${D.lower[i]}, ${D.upper[i]})`), make("td", producer, "quiet"));
    row.addEventListener("click", () => { reveal(i); pick(i, cursor); });
    body.append(row);
  }
  const head = make("thead"), titles = make("tr");
  for (const title of ["buffer", "shape", "bytes", "lifetime", "written by"])
    titles.append(make("th", title, title === "bytes" ? "bytes" : ""));
  head.append(titles);
  const table = make("table");
  table.append(head, body);
  const rest = alive.slice(most).reduce((sum, i) => sum + D.nbytes[i], 0);
  const parts = [make("h2", `${number.format(alive.length)} buffers alive at ${where}${step(cursor)}`), table];
  if (rest) parts.push(make("p", `and ${number.format(alive.length - most)} smaller ones, ${iec(rest)} together`, "quiet"));
  $("alive").replaceChildren(...parts);
}
function drawLegend() {
  D.categories.forEach((category, c) => {
    const chip = make("button", undefined, "chip");
    chip.type = "button";
    chip.title = "Bytes at the peak; click to hide or show";
    chip.setAttribute("aria-pressed", "true");
    chip.append(swatch(c), make("span", category.replace("_", " ")), make("small", iec(live[c][D.peak] || 0)));
    chip.addEventListener("click", () => {
      shown[c] = !shown[c];
      chip.setAttribute("aria-pressed", String(shown[c]));
      redraw();
    });
    $("legend").append(chip);
  });
}
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  readTheme();
  redraw();
}
const preferred = window.matchMedia("(prefers-color-scheme: dark)");
preferred.addEventListener("change", () => setTheme(preferred.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("search").addEventListener("input", (event) => search(event.target.value));
$("reset").addEventListener("click", showAll);
$("topeak").addEventListener("click", toPeak);
$("zoomin").addEventListener("click", () => centre(0.7));
$("zoomout").addEventListener("click", () => centre(1 / 0.7));
function move(dx, dy) {
  const w = (view.x1 - view.x0) * dx, h = (view.y1 - view.y0) * dy;
  Object.assign(view, { x0: view.x0 + w, x1: view.x1 + w, y0: view.y0 + h, y1: view.y1 + h });
  clamp();
  redraw();
}
document.addEventListener("keydown", (event) => {
  if (event.target === $("search")) {
    if (event.key === "Escape") { event.target.value = ""; search(""); event.target.blur(); }
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = {
    "/": () => $("search").focus(), p: toPeak, "0": showAll, "+": () => centre(0.7), "=": () => centre(0.7),
    "-": () => centre(1 / 0.7), Escape: () => pick(-1, D.peak), ArrowLeft: () => move(-0.15, 0),
    ArrowRight: () => move(0.15, 0), ArrowUp: () => move(0, 0.15), ArrowDown: () => move(0, -0.15),
  };
  const action = keys[event.key];
  if (!action) return;
  if (event.key.startsWith("Arrow") && document.activeElement !== map) return;
  event.preventDefault();
  action();
});
drawLegend();
drawPanels();
setTheme(preferred.matches ? "dark" : "light");
new ResizeObserver(resize).observe($("stage"));
resize();
