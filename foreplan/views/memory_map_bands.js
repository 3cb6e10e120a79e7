// ---- bands over the map: a lane for each phase of the step, and rows of modules ------------------------------------------
const LANE = 12, ROW = 17, ROWS = 4;
const lanes = D.phases.map((_, phase) => phase).filter((phase) => plans.some((p) => p.lanes[phase].length));
const bandsTall = () => lanes.length * LANE + ROWS * ROW + 8;
bands.style.height = `${bandsTall()}px`;
const rowTop = (row) => lanes.length * LANE + 6 + row * ROW;

function drawBands() {
  const g = bands.getContext("2d");
  g.fillStyle = theme.panel;
  g.fillRect(0, 0, width, bandsHeight);
  g.font = FONT.replace("12px", "10.5px");
  g.textAlign = "right";
  g.textBaseline = "middle";
  g.fillStyle = theme.quiet;
  lanes.forEach((phase, k) => g.fillText(D.phases[phase], LEFT - 8, 3 + k * LANE + LANE / 2));
  g.fillText("modules", LEFT - 8, rowTop(0) + ROW / 2);
  g.textAlign = "left";
  clipped(g, 0, bandsHeight, () => {
    lanes.forEach((phase, k) => drawLane(g, phase, 3 + k * LANE));
    const first = firstLevel();
    for (let row = 0; row < ROWS; row++) if (P.levels[first + row]) drawModules(g, first + row, row);
  });
}
// Runs of instructions that are in view, none of them narrower than a pixel: those that would be fall into one.
function visibleRuns(runs, size, each) {
  const edges = P.edges[axis];
  let low = 0, high = runs.length / size;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (edges[runs[middle * size + 1]] < view.x0) low = middle + 1; else high = middle;
  }
  let drawn = -Infinity;
  for (let k = low * size; k < runs.length && edges[runs[k]] <= view.x1; k += size) {
    const left = sx(edges[runs[k]]), right = Math.max(left + 1, sx(edges[runs[k + 1]]));
    if (right - drawn < 1) continue;
    each(Math.max(LEFT, left), Math.min(width - RIGHT, right), k);
    work.calls++;
    drawn = right;
  }
}
function drawLane(g, phase, y) {
  g.fillStyle = theme.grid;
  g.fillRect(LEFT, y + LANE / 2, width - LEFT - RIGHT, 1);
  g.fillStyle = PHASES[D.phases[phase]];
  visibleRuns(P.lanes[phase], 2, (left, right) => g.fillRect(left, y + 2, right - left, LANE - 4));
}
// The first row is the deepest module that holds all that is in view, so zooming in leads to parts of parts.
function firstLevel() {
  const from = stepAt(view.x0), to = stepAt(view.x1);
  let level = 0;
  while (level + 1 < P.levels.length && nodeAt(level + 1, from) && nodeAt(level + 1, from) === nodeAt(level + 1, to)
    && runAt(level + 1, from) === runAt(level + 1, to)) level++;
  return level;
}
function nodeAt(level, s) {
  const node = P.steps.name.length ? ancestor(P.steps.name[s], level + 1) : 0;
  return depthOf[node] === level + 1 ? node : 0;
}
// The index of the run of a level that holds an instruction; -1: none does.
function runAt(level, s) {
  const runs = P.levels[level] || [];
  let low = 0, high = runs.length / 3 - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (runs[middle * 3] <= s) low = middle; else high = middle - 1;
  }
  return runs.length && runs[low * 3] <= s && s < runs[low * 3 + 1] ? low : -1;
}
const hues = new Map();
function moduleColour(node, row) {
  const root = ancestor(node, Math.min(2, depthOf[node]));
  if (!hues.has(root)) hues.set(root, (hues.size * 137.5) % 360);
  const dark = document.documentElement.dataset.theme === "dark";
  return `hsl(${hues.get(root)} ${dark ? 28 : 48}% ${dark ? 30 - row * 3 : 84 + row * 2.5}%)`;
}
function drawModules(g, level, row) {
  const runs = P.levels[level], y = rowTop(row), narrow = { from: 0, to: 0, first: 0, last: 0, count: 0 };
  const write = (text, left, room) => { g.fillStyle = theme.ink; g.fillText(shorten(g, text, room), left, y + ROW / 2); };
  const nameAt = (k) => (row ? partOf(runs[k + 2]) : fullNames[runs[k + 2]]);
  const writeNarrow = () => {  // several modules under one text, where none has room for its own
    const room = narrow.to - narrow.from - 8;
    if (room > 22 && narrow.count <= 20) write(`${nameAt(narrow.first)} … ${nameAt(narrow.last)}`, narrow.from + 4, room);
    narrow.count = 0;
  };
  visibleRuns(runs, 3, (left, right, k) => {
    g.fillStyle = moduleColour(runs[k + 2], row);
    g.fillRect(left, y, Math.max(0.7, right - left - (right - left > 3 ? 1 : 0)), ROW - 1);
    if (narrow.count && (right - left >= 26 || left - narrow.to > 1 || narrow.to - narrow.from > 100)) writeNarrow();
    if (right - left >= 26) write(nameAt(k), left + 4, right - left - 8);
    else if (narrow.count++) Object.assign(narrow, { to: right, last: k });
    else Object.assign(narrow, { from: left, to: right, first: k, last: k });
  });
  if (narrow.count) writeNarrow();
}
// What lies at a place of the bands: {from, to, node} of a module, {from, to, phase} of a lane, or null.
function bandAt(px, py) {
  if (px < LEFT || px > width - RIGHT) return null;
  const s = stepAt(ux(px)), lane = Math.floor((py - 3) / LANE);
  if (lane >= 0 && lane < lanes.length) {
    const runs = P.lanes[lanes[lane]];
    for (let k = 0; k < runs.length; k += 2)
      if (runs[k] <= s && s < runs[k + 1]) return { from: runs[k], to: runs[k + 1], phase: lanes[lane] };
    return null;
  }
  const row = Math.floor((py - rowTop(0)) / ROW), level = firstLevel() + row;
  const run = row >= 0 && row < ROWS ? runAt(level, s) : -1;
  if (run < 0) return null;
  const [from, to, node] = P.levels[level].subarray(run * 3, run * 3 + 3);
  return { from, to, node };
}
function bandFacts({ from, to, node, phase }) {
  const list = make("dl", undefined, "facts"), rows = [["instructions", `${from} to ${to - 1}: ${number.format(to - from)}`]];
  if (P.edges.time) rows.push(["predicted", duration(P.edges.time[to] - P.edges.time[from])]);
  let most = from;
  for (let s = from; s < to; s++) if (P.total[s] > P.total[most]) most = s;
  rows.push(["most live", `${iec(P.total[most])} at ${step(most)}`]);
  if (node) rows.push(["its own", `${iec(bytesWithin(node, most))} of that`]);
  for (const [key, value] of rows) list.append(make("dt", key), make("dd", value));
  return [make("b", node ? fullNames[node] : D.phases[phase]), list];
}
function bytesWithin(node, s) {
  let sum = 0;
  for (let i = 0; i < P.count; i++)
    if (P.counted[B.region[i]] && B.lower[i] <= s && s < B.upper[i] && isWithin(B.name[i], node)) sum += B.nbytes[i];
  return sum;
}
