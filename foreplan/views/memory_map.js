// ---- the view: what of the plans is shown ----------------------------------------------------------------------------
let axis = "steps";  // or "time"
const topOf = () => Math.max(1, ...plans.map((p) => p.top)) * 1.03;
const endOf = () => Math.max(1, ...plans.map((p) => p.edges[axis][p.length]));
const view = { x0: 0, x1: endOf(), y0: 0, y1: topOf() };
const map = $("map"), chart = $("live"), bands = $("bands"), tip = $("tip");
const shown = D.categories.map(() => true);
let hover = -1, picked = -1, cursor = P.peak, found = null, theme = {};
const LEFT = 84, RIGHT = 14, UPPER = 24, LOWER = 42, GAP = 3;
let width = 0, height = 0, chartHeight = 0, bandsHeight = 0, pending = false;
const work = { painted: 0, calls: 0 };  // of the last frame: buffers in view, and what was drawn for lanes and modules

const sx = (x) => LEFT + ((x - view.x0) / (view.x1 - view.x0)) * (width - LEFT - RIGHT);
const sy = (y) => height - LOWER - ((y - view.y0) / (view.y1 - view.y0)) * (height - UPPER - LOWER);
const ux = (px) => view.x0 + ((px - LEFT) / (width - LEFT - RIGHT)) * (view.x1 - view.x0);
const uy = (py) => view.y0 + ((height - LOWER - py) / (height - UPPER - LOWER)) * (view.y1 - view.y0);
const edge = (s) => P.edges[axis][Math.min(s, P.length)];
const middleOf = (s) => (edge(s) + edge(s + 1)) / 2;
// The instruction at a place of the axis.
function stepAt(x, edges = P.edges[axis]) {
  let low = 0, high = P.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (edges[middle] <= x) low = middle; else high = middle - 1;
  }
  return low;
}

function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; draw(); });
}
function draw() {
  work.painted = work.calls = 0;
  drawBands();
  drawMap();
  drawLive();
  remember();
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
  [, bandsHeight] = fit(bands);
  draw();  // at once: giving a canvas its size has just wiped it
}
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const key of ["panel", "ink", "quiet", "line", "grid", "peak", "hover", "free", "accent"])
    theme[key] = style.getPropertyValue(`--${key}`).trim();
}
function clamp() {
  const end = endOf(), top = topOf(), least = Math.min(end, axis === "steps" ? 4 : end / P.length);
  for (const [a, b, high, low] of [["x0", "x1", end, least], ["y0", "y1", top, Math.min(top, 256)]]) {
    const span = Math.min(high, Math.max(low, view[b] - view[a]));
    const start = Math.min(Math.max(0, (view[a] + view[b]) / 2 - span / 2), high - span);
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
function decimalTicks(low, high, room) {
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

// Buffers are painted into pixels of our own: 100,000 rectangles take a few milliseconds, as drawing calls they do not.
const sheet = document.createElement("canvas");
let image = null, pixels = null;
function rgba(colour, factor, alpha) {
  const [r, g, b] = [1, 3, 5].map((k) => Math.round(parseInt(colour.slice(k, k + 2), 16) * factor));
  return ((alpha << 24) | (b << 16) | (g << 8) | r) >>> 0;
}
// Two shades a category, so that neighbours of one kind can be told apart.
const inkOf = [255, 34, 70, 18].map((alpha) => colourOf.map((c) => [rgba(c, 1, alpha), rgba(c, 0.86, alpha)]));
const FULL = 0, DIM = 1, GHOST = 2, DIM_GHOST = 3;
function drawBuffers(g) {
  const ratio = window.devicePixelRatio || 1;
  const w = Math.max(1, Math.round((width - LEFT - RIGHT) * ratio)), h = Math.max(1, Math.round((height - UPPER - LOWER) * ratio));
  if (!image || image.width !== w || image.height !== h) {
    sheet.width = w; sheet.height = h;
    image = new ImageData(w, h);
    pixels = new Uint32Array(image.data.buffer);
  }
  pixels.fill(0);
  for (const p of plans) if (p !== P) paint(p, p.bySize, w, h, () => (found === null ? GHOST : DIM_GHOST), []);
  const labels = [];
  paint(P, P.bySize, w, h, found === null ? () => FULL : (i) => (found.has(i) ? FULL : DIM), labels);
  if (found !== null) paint(P, found, w, h, () => FULL, []);  // a match is never hidden under a neighbour
  sheet.getContext("2d").putImageData(image, 0, 0);
  g.drawImage(sheet, LEFT, UPPER, width - LEFT - RIGHT, height - UPPER - LOWER);
  for (const [i, x, y, bw, bh] of labels)
    if (found === null || found.has(i)) label(g, i, LEFT + x / ratio, UPPER + y / ratio, bw / ratio, bh / ratio);
}
function paint(p, which, w, h, stateOf, labels) {
  const b = p.buffers, edges = p.edges[axis], kx = w / (view.x1 - view.x0), ky = h / (view.y1 - view.y0);
  for (const i of which) {
    if (!shown[b.category[i]]) continue;
    const x0 = (edges[b.lower[i]] - view.x0) * kx, x1 = (edges[b.upper[i]] - view.x0) * kx;
    const y1 = h - (p.at[i] - view.y0) * ky, y0 = y1 - b.nbytes[i] * ky;
    if (x1 < 0 || x0 > w || y1 < 0 || y0 > h) continue;
    work.painted++;
    const colour = inkOf[stateOf(i)][b.category[i]][p.shade[i]];
    const left = Math.max(0, Math.min(w - 1, Math.round(x0))), top = Math.max(0, Math.min(h - 1, Math.round(y0)));
    let right = Math.min(w, Math.max(left + 1, Math.round(x1))), bottom = Math.min(h, Math.max(top + 1, Math.round(y1)));
    if (right - left > 3 && bottom - top > 3) {  // a seam
      right -= 1; bottom -= 1;
      if (right - left > 46 && bottom - top > 15) labels.push([i, left, top, right - left, bottom - top]);
    }
    for (let y = top; y < bottom; y++) {
      if (right - left === 1) pixels[y * w + left] = colour; else pixels.fill(colour, y * w + left, y * w + right);
    }
  }
}
function label(g, i, x, y, w, h) {
  const room = w - 10;
  if (room < 34 || h < 14) return;
  g.fillStyle = "#ffffff";
  g.textBaseline = "middle";
  g.font = "600 " + FONT;
  g.shadowColor = "rgb(0 0 0 / 65%)";
  g.shadowBlur = 2.5;
  const middle = y + h / 2, two = h > 32;
  g.fillText(shorten(g, nameOf(i), room), x + 5, two ? middle - 7 : middle);
  g.font = FONT;
  if (two) g.fillText(shorten(g, iec(B.nbytes[i]) + (shapeOf(i) ? "  " + shapeOf(i) : ""), room), x + 5, middle + 8);
  g.shadowBlur = 0;
}
function outline(g, i, colour, line, dash = []) {
  const x = sx(edge(B.lower[i])), y = sy(P.at[i] + B.nbytes[i]);
  g.strokeStyle = colour;
  g.lineWidth = line;
  g.setLineDash(dash);
  g.strokeRect(x, y, Math.max(2, sx(edge(B.upper[i])) - x), Math.max(2, sy(P.at[i]) - y));
  g.setLineDash([]);
}
// All lives of the picked value: outlined, and joined by a line from the end of one to the beginning of the next.
function drawLives(g) {
  const lives = livesWith(picked);
  g.strokeStyle = theme.hover;
  g.lineWidth = 1.6;
  g.setLineDash([2, 4]);
  g.beginPath();
  for (let k = 1; k < lives.length; k++) {
    const [a, b] = [lives[k - 1], lives[k]];
    g.moveTo(sx(edge(B.upper[a])), sy(P.at[a] + B.nbytes[a] / 2));
    g.lineTo(sx(edge(B.lower[b])), sy(P.at[b] + B.nbytes[b] / 2));
  }
  g.stroke();
  g.setLineDash([]);
  for (const i of lives) if (i !== picked) outline(g, i, theme.hover, 2, [5, 3]);
  outline(g, picked, theme.hover, 2.5);
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
  drawTicks(g, bottom);
  clipped(g, UPPER, bottom, () => {
    drawBuffers(g);
    drawRegions(g);
    for (const p of plans) if (p !== P) level(g, sy(p.arena), `arena ${iec(p.arena)} (${p.label})`, theme.quiet, [3, 3]);
    level(g, sy(P.arena), `arena ${iec(P.arena)}`, theme.ink, []);
    if (P.budget !== null) level(g, sy(P.budget), `budget ${iec(P.budget)}`, theme.accent, [7, 4]);
    if (picked >= 0) drawLives(g);
    if (hover >= 0 && hover !== picked) outline(g, hover, theme.hover, 1.5);
  });
  verticals(g, UPPER, bottom, true);
}
// Two rows of ticks: instructions and predicted time, one of which is even.
function drawTicks(g, bottom) {
  const room = Math.max(2, (width - LEFT) / 110), time = P.edges.time;
  const inTime = (s) => time[Math.min(P.length, Math.max(0, Math.round(s)))];
  g.textBaseline = "top";
  g.fillStyle = theme.quiet;
  g.fillText(axis === "time" ? "time" : "instruction", LEFT - 8, bottom + 6);
  if (time) g.fillText(axis === "time" ? "instruction" : "time", LEFT - 8, bottom + 22);
  for (const x of decimalTicks(view.x0, view.x1, room)) {
    g.fillStyle = theme.grid;
    g.fillRect(sx(x), UPPER, 1, bottom - UPPER);
    g.fillStyle = theme.quiet;
    const s = axis === "steps" && !P.steps.place ? x : stepAt(x);
    g.textAlign = sx(x) < LEFT + 16 ? "left" : "center";
    g.fillText(axis === "time" ? duration(x) : number.format(x), sx(x), bottom + 6);
    if (time) g.fillText(axis === "time" ? number.format(s) : duration(inTime(s)), sx(x), bottom + 22);
  }
  g.textAlign = "left";
}
function drawRegions(g) {
  for (let r = 1; r < P.regions.length; r++) {
    if (!P.heights[r]) continue;
    const from = P.base[r];
    const tall = sy(from) - sy(from + P.heights[r]) > 40;
    level(g, sy(from), tall ? `\u2191 ${P.regions[r]}` : "", theme.ink, [2, 3]);
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
  if (!text || y < UPPER - 1) return;
  g.font = "600 " + FONT;
  const room = g.measureText(text).width + 10;
  const at = Math.max(UPPER + 9, Math.min(y, height - LOWER - 9));  // a text is never cut
  g.fillStyle = theme.panel;
  g.fillRect(width - RIGHT - room - 4, at - 9, room, 18);
  g.fillStyle = colour;
  g.textBaseline = "middle";
  g.fillText(text, width - RIGHT - room + 1, at);
}
function verticals(g, top, bottom, labelled) {
  const lines = [[P.peak, theme.peak, `peak: ${iec(P.total[P.peak] || 0)} live at ${step(P.peak)}`]];
  if (cursor !== P.peak) lines.push([cursor, theme.accent, `${iec(P.total[cursor] || 0)} live at ${step(cursor)}`]);
  for (const [at, colour, text] of lines) {
    const x = sx(middleOf(at));
    if (x < LEFT - 1 || x > width - RIGHT + 1) continue;
    g.strokeStyle = colour;
    g.lineWidth = 1.6;
    g.beginPath();
    g.moveTo(x, top - (labelled ? 4 : 0));
    g.lineTo(x, bottom);
    g.stroke();
    if (!labelled) continue;
    if (at === P.peak && cursor !== P.peak && Math.abs(sx(middleOf(cursor)) - x) < 430) continue;
    g.font = "600 " + FONT;
    g.textBaseline = "middle";
    const short = shorten(g, text, 420), room = g.measureText(short).width;
    g.fillStyle = colour;
    g.fillText(short, Math.min(Math.max(LEFT, x - room / 2), width - RIGHT - room), 10);
  }
}
// One column an instruction, or, where there are more of them than pixels, the highest of several.
function liveColumns(p) {
  const edges = p.edges[axis], columns = [];
  for (let s = 0; s < p.length; s++) {
    if (edges[s + 1] < view.x0 || edges[s] > view.x1) continue;
    const left = Math.round(sx(edges[s])), right = Math.max(left + 1, Math.round(sx(edges[s + 1])));
    const last = columns[columns.length - 1];
    if (last && left === last[1]) {
      if (p.total[s] > p.total[last[0]]) last[0] = s;
      if (right > left + 1) columns.push([s, left + 1, right]);
    } else columns.push([s, left, right]);
  }
  return columns;
}
function drawLive() {
  const g = chart.getContext("2d"), top = 12, bottom = chartHeight - 12;
  const highest = Math.max(...plans.map((p) => Math.max(p.arena, p.budget || 0)), 1) * 1.04;
  const y = (bytes) => bottom - (bytes / highest) * (bottom - top);
  g.fillStyle = theme.panel;
  g.fillRect(0, 0, width, chartHeight);
  g.font = FONT;
  g.fillStyle = theme.quiet;
  g.textBaseline = "middle";
  g.textAlign = "right";
  g.fillText("live bytes", LEFT - 8, bottom - 6);
  g.fillText(iec(P.arena), LEFT - 8, y(P.arena) + 2);
  g.textAlign = "left";
  clipped(g, 0, chartHeight, () => {
    const columns = liveColumns(P);
    for (const [s, left, right] of columns) {
      let floor = 0;
      for (let c = 0; c < P.live.length; c++) {
        if (!shown[c] || !P.live[c][s]) continue;
        const low = Math.round(y(floor));
        floor += P.live[c][s];
        g.fillStyle = colourOf[c];
        g.fillRect(left, Math.round(y(floor)), right - left, low - Math.round(y(floor)));
      }
    }
    for (const p of plans) if (p !== P) line(g, liveColumns(p), p, y, theme.quiet, [4, 3]);
    line(g, columns, P, y, theme.ink, []);
    level(g, y(P.arena), "", theme.quiet, [2, 3]);
    if (P.budget !== null) level(g, y(P.budget), "", theme.accent, [7, 4]);
  });
  verticals(g, 4, bottom, false);
}
function line(g, columns, p, y, colour, dash) {
  g.strokeStyle = colour;
  g.lineWidth = 1.3;
  g.setLineDash(dash);
  g.beginPath();
  for (const [s, left, right] of columns) { g.lineTo(left, y(p.total[s])); g.lineTo(right, y(p.total[s])); }
  g.stroke();
  g.setLineDash([]);
}
