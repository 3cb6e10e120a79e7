"use strict";
// Data, all plain columns: D.name[D.nameOf[i]], D.lower[i], D.upper[i], D.base[D.region[i]] + D.offset[i], …
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const N = D.lower.length, STEPS = Math.max(1, D.steps.length), TOP = Math.max(1, D.top);
const COLOURS = {
  parameters: "#3f78b5", optimizer_state: "#8b5fb4", gradients: "#e0702b", activations: "#3a9a63",
  workspace: "#8a8f98", inputs: "#c9a21b", outputs: "#1fa3b3",
};
const colourOf = D.categories.map((c) => COLOURS[c] || "#777777");
// Two shades a category, so that neighbours of one kind can be told apart.
const shadesOf = colourOf.map((c) => [c, "#" + [1, 3, 5].map((k) => shade(parseInt(c.slice(k, k + 2), 16))).join("")]);
function shade(level) {
  return Math.round(level * 0.88).toString(16).padStart(2, "0");
}
const shown = D.categories.map(() => true);
const base = new Float64Array(N);
for (let i = 0; i < N; i++) base[i] = D.base[D.region[i]] + D.offset[i];
const parity = new Uint8Array(N), seen = D.categories.map(() => 0);
for (let i = 0; i < N; i++) parity[i] = seen[D.category[i]]++ & 1;
const bySize = Array.from({ length: N }, (_, i) => i).sort((a, b) => D.nbytes[b] - D.nbytes[a] || a - b);

// ---- text -------------------------------------------------------------------------------------------------------
const number = new Intl.NumberFormat("en-US");
function iec(bytes) {
  let size = bytes, unit = "B";
  for (const next of ["KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(size) < 1024) break;
    size /= 1024; unit = next;
  }
  return unit === "B" ? `${bytes} B` : `${size >= 100 ? size.toFixed(1) : size.toFixed(2)} ${unit}`;
}
const exact = (bytes) => (bytes < 1024 ? `${bytes} B` : `${iec(bytes)} (${number.format(bytes)} bytes)`);
const step = (i) => (i >= STEPS ? "the end" : `${i} ${D.steps[i] || ""}`.trim());
const nameOf = (i) => D.name[D.nameOf[i]];
const shapeOf = (i) => D.shape[D.shapeOf[i]];
function make(tag, text, cls) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (cls) element.className = cls;
  return element;
}
function swatch(category) {
  const element = make("span", undefined, "swatch");
  element.style.background = colourOf[category];
  return element;
}
function facts(i) {
  const last = Math.max(D.lower[i], D.upper[i] - 1);
  const rows = [["bytes", exact(D.nbytes[i])]];
  if (shapeOf(i)) rows.unshift(["shape", shapeOf(i)]);
  rows.push(["category", D.categories[D.category[i]].replace("_", " ")]);
  rows.push(["lifetime", `[${D.lower[i]}, ${D.upper[i]}): ${D.upper[i] - D.lower[i]} instructions`]);
  rows.push(["first", step(D.lower[i])], ["last", step(last)]);
  rows.push(["offset", `${number.format(D.offset[i])} in ${D.regions[D.region[i]]}`]);
  if (D.producer[i] >= 0) rows.push(["written by", D.producers[D.producer[i]]]);
  const list = make("dl", undefined, "facts");
  for (const [key, value] of rows) list.append(make("dt", key), make("dd", value));
  return list;
}

// ---- live bytes, by category and in all ----------------------------------------------------------------------------
const live = D.categories.map(() => new Float64Array(STEPS + 1));
for (let i = 0; i < N; i++) {
  if (!D.counted[i]) continue;
  const grain = D.grain[D.region[i]], taken = Math.ceil(D.nbytes[i] / grain) * grain;
  live[D.category[i]][D.lower[i]] += taken;
  live[D.category[i]][D.upper[i]] -= taken;
}
for (const row of live) for (let s = 1; s <= STEPS; s++) row[s] += row[s - 1];
const total = new Float64Array(STEPS);
for (const row of live) for (let s = 0; s < STEPS; s++) total[s] += row[s];

// ---- state ----------------------------------------------------------------------------------------------------------
const view = { x0: 0, x1: STEPS, y0: 0, y1: TOP * 1.03 };
const map = $("map"), chart = $("live"), tip = $("tip");
let hover = -1, picked = -1, cursor = D.peak, query = "", found = null, theme = {};
const LEFT = 84, RIGHT = 14, UPPER = 26, LOWER = 26;
let width = 0, height = 0, chartHeight = 0, pending = false;

const sx = (x) => LEFT + ((x - view.x0) / (view.x1 - view.x0)) * (width - LEFT - RIGHT);
const sy = (y) => height - LOWER - ((y - view.y0) / (view.y1 - view.y0)) * (height - UPPER - LOWER);
const ux = (px) => view.x0 + ((px - LEFT) / (width - LEFT - RIGHT)) * (view.x1 - view.x0);
const uy = (py) => view.y0 + ((height - LOWER - py) / (height - UPPER - LOWER)) * (view.y1 - view.y0);

function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; drawMap(); drawLive(); });
}
function fit(canvas) {
  const ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
  canvas.width = Math.round(box.width * ratio);
  canvas.height = Math.round(box.height * ratio);
  canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  return [box.width, box.height];
}
function resize() {
  [width, height] = fit(map);
  [, chartHeight] = fit(chart);
  drawMap();  // at once: giving a canvas its size has just wiped it
  drawLive();
}
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const key of ["panel", "ink", "quiet", "line", "grid", "peak", "hover", "free", "accent"])
    theme[key] = style.getPropertyValue(`--${key}`).trim();
}
function clamp() {
  const minX = Math.min(STEPS, 4), minY = Math.min(TOP, 256);
  for (const [a, b, low, high, least] of [["x0", "x1", 0, STEPS, minX], ["y0", "y1", 0, TOP * 1.03, minY]]) {
    let span = Math.min(high - low, Math.max(least, view[b] - view[a]));
    const middle = (view[a] + view[b]) / 2;
    let start = Math.min(Math.max(low, middle - span / 2), high - span);
    view[a] = start; view[b] = start + span;
  }
}

// ---- drawing ----------------------------------------------------------------------------------------------------------
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
function byteTicks(low, high, room) {
  let size = 1;
  while ((high - low) / size > room) size *= 2;
  const ticks = [];
  for (let y = Math.ceil(low / size) * size; y <= high; y += size) ticks.push(y);
  return ticks;
}
function stepTicks(low, high, room) {
  let size = 1;
  for (let i = 0; (high - low) / size > room; i++) size *= [2, 2.5, 2][i % 3];
  const ticks = [];
  for (let x = Math.ceil(low / size) * size; x < high; x += size) ticks.push(x);
  return ticks;
}
function clipped(g, top, bottom, paint) {
  g.save();
  g.beginPath();
  g.rect(LEFT, top, width - LEFT - RIGHT, bottom - top);
  g.clip();
  paint();
  g.restore();
}
function shorten(g, text, room) {
  if (g.measureText(text).width <= room) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (g.measureText(text.slice(0, middle) + "…").width <= room) low = middle; else high = middle - 1;
  }
  return low > 1 ? text.slice(0, low) + "…" : "";
}
function drawBuffers(g) {
  const edge = theme.panel;
  for (let i = 0; i < N; i++) {
    if (!shown[D.category[i]] || D.upper[i] < view.x0 || D.lower[i] > view.x1) continue;
    if (base[i] > view.y1 || base[i] + D.nbytes[i] < view.y0) continue;
    const x = sx(D.lower[i]), y = sy(base[i] + D.nbytes[i]);
    const w = Math.max(0.7, sx(D.upper[i]) - x), h = Math.max(0.7, sy(base[i]) - y);
    g.globalAlpha = found === null || found.has(i) ? 1 : 0.13;
    g.fillStyle = shadesOf[D.category[i]][parity[i]];
    g.fillRect(x, y, w, h);
    if (w > 3 && h > 3) {
      g.strokeStyle = edge;
      g.lineWidth = 0.8;
      g.strokeRect(x, y, w, h);
    }
    if (w > 46 && h > 15 && g.globalAlpha === 1) label(g, i, x, y, w, h);
  }
  g.globalAlpha = 1;
}
function label(g, i, x, y, w, h) {
  const left = Math.max(x, LEFT), room = Math.min(x + w, width - RIGHT) - left - 10;
  if (room < 34) return;
  const top = Math.max(y, UPPER), bottom = Math.min(y + h, height - LOWER);
  if (bottom - top < 14) return;
  g.fillStyle = "#ffffff";
  g.textBaseline = "middle";
  g.font = "600 " + FONT;
  g.shadowColor = "rgb(0 0 0 / 65%)";
  g.shadowBlur = 2.5;
  const middle = (top + bottom) / 2, two = bottom - top > 32;
  g.fillText(shorten(g, nameOf(i), room), left + 5, two ? middle - 7 : middle);
  g.font = FONT;
  if (two) g.fillText(shorten(g, iec(D.nbytes[i]) + (shapeOf(i) ? "  " + shapeOf(i) : ""), room), left + 5, middle + 8);
  g.shadowBlur = 0;
}
function outline(g, i, colour, line) {
  const x = sx(D.lower[i]), y = sy(base[i] + D.nbytes[i]);
  g.strokeStyle = colour;
  g.lineWidth = line;
  g.strokeRect(x, y, Math.max(2, sx(D.upper[i]) - x), Math.max(2, sy(base[i]) - y));
}
function drawMap() {
  const g = map.getContext("2d");
  g.fillStyle = theme.panel;
  g.fillRect(0, 0, width, height);
  g.font = FONT;
  const bottom = height - LOWER;
  g.textBaseline = "middle";
  g.textAlign = "right";
  for (const y of byteTicks(view.y0, view.y1, Math.max(2, (bottom - UPPER) / 44))) {
    g.fillStyle = theme.grid;
    g.fillRect(LEFT, sy(y), width - LEFT - RIGHT, 1);
    g.fillStyle = theme.quiet;
    g.fillText(iec(y), LEFT - 8, sy(y));
  }
  g.textAlign = "center";
  g.textBaseline = "top";
  for (const x of stepTicks(view.x0, view.x1, Math.max(2, (width - LEFT) / 90))) {
    g.fillStyle = theme.grid;
    g.fillRect(sx(x), UPPER, 1, bottom - UPPER);
    g.fillStyle = theme.quiet;
    g.fillText(number.format(x), sx(x), bottom + 7);
  }
  g.textAlign = "left";
  clipped(g, UPPER, bottom, () => {
    drawBuffers(g);
    drawRegions(g);
    level(g, sy(D.arena), `arena ${iec(D.arena)}`, theme.ink, []);
    if (D.budget !== null) level(g, sy(D.budget), `budget ${iec(D.budget)}`, theme.accent, [7, 4]);
    if (picked >= 0) outline(g, picked, theme.hover, 2.5);
    if (hover >= 0 && hover !== picked) outline(g, hover, theme.hover, 1.5);
  });
  verticals(g, UPPER, bottom, true);
}
function drawRegions(g) {
  for (let r = 1; r < D.regions.length; r++) {
    if (!D.heights[r]) continue;
    const tall = sy(D.base[r]) - sy(D.base[r] + D.heights[r]) > 40;
    level(g, sy(D.base[r]), tall ? `\u2191 ${D.regions[r]}` : "", theme.ink, [2, 3]);
  }
}
function level(g, y, text, colour, dash) {
  g.strokeStyle = colour;
  g.lineWidth = 1.2;
  g.setLineDash(dash);
  g.beginPath();
  g.moveTo(LEFT, y);
  g.lineTo(width - RIGHT, y);
  g.stroke();
  g.setLineDash([]);
  if (!text) return;
  g.font = "600 " + FONT;
  const room = g.measureText(text).width + 10;
  g.fillStyle = theme.panel;
  g.fillRect(width - RIGHT - room - 4, y - 9, room, 18);
  g.fillStyle = colour;
  g.textBaseline = "middle";
  g.fillText(text, width - RIGHT - room + 1, y);
}
function verticals(g, top, bottom, labelled) {
  const lines = [[D.peak, theme.peak, `peak: ${iec(total[D.peak] || 0)} live at ${step(D.peak)}`]];
  if (cursor !== D.peak) lines.push([cursor, theme.accent, `${iec(total[cursor] || 0)} live at ${step(cursor)}`]);
  for (const [at, colour, text] of lines) {
    const x = sx(at + 0.5);
    if (x < LEFT - 1 || x > width - RIGHT + 1) continue;
    g.strokeStyle = colour;
    g.lineWidth = 1.6;
    g.beginPath();
    g.moveTo(x, top - (labelled ? 4 : 0));
    g.lineTo(x, bottom);
    g.stroke();
    if (!labelled) continue;
    if (at === D.peak && cursor !== D.peak && Math.abs(sx(cursor + 0.5) - x) < 260) continue;
    g.font = "600 " + FONT;
    g.textBaseline = "middle";
    const short = shorten(g, text, 420), room = g.measureText(short).width;
    g.fillStyle = colour;
    g.fillText(short, Math.min(Math.max(LEFT, x - room / 2), width - RIGHT - room), 12);
  }
}
// One column an instruction, or, where there are more of them than pixels, the highest of several.
function liveColumns() {
  const first = Math.max(0, Math.floor(view.x0)), last = Math.min(STEPS, Math.ceil(view.x1));
  const together = Math.max(1, Math.floor((last - first) / (width - LEFT - RIGHT))), columns = [];
  for (let s = first; s < last; s += together) {
    const end = Math.min(last, s + together);
    let highest = s;
    for (let k = s; k < end; k++) if (total[k] > total[highest]) highest = k;
    columns.push([highest, Math.round(sx(s)), Math.max(Math.round(sx(s)) + 1, Math.round(sx(end)))]);
  }
  return columns;
}
function drawLive() {
  const g = chart.getContext("2d"), top = 12, bottom = chartHeight - 12;
  const highest = Math.max(D.arena, D.budget || 0, 1) * 1.04;
  const y = (bytes) => bottom - (bytes / highest) * (bottom - top);
  g.fillStyle = theme.panel;
  g.fillRect(0, 0, width, chartHeight);
  g.font = FONT;
  g.fillStyle = theme.quiet;
  g.textBaseline = "middle";
  g.textAlign = "right";
  g.fillText("live bytes", LEFT - 8, bottom - 6);
  g.fillText(iec(D.arena), LEFT - 8, y(D.arena) + 2);
  g.textAlign = "left";
  clipped(g, 0, chartHeight, () => {
    const columns = liveColumns();
    for (const [s, left, right] of columns) {
      let floor = 0;
      for (let c = 0; c < live.length; c++) {
        if (!shown[c] || !live[c][s]) continue;
        const low = Math.round(y(floor));
        floor += live[c][s];
        g.fillStyle = colourOf[c];
        g.fillRect(left, Math.round(y(floor)), right - left, low - Math.round(y(floor)));
      }
    }
    g.strokeStyle = theme.ink;
    g.lineWidth = 1.3;
    g.beginPath();
    for (const [s, left, right] of columns) { g.lineTo(left, y(total[s])); g.lineTo(right, y(total[s])); }
    g.stroke();
    level(g, y(D.arena), "", theme.quiet, [2, 3]);
    if (D.budget !== null) level(g, y(D.budget), "", theme.accent, [7, 4]);
  });
  verticals(g, 4, bottom, false);
}

