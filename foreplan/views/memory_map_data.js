"use strict";
// ---- the data of the page: see memory_map_data.py ------------------------------------------------------------------
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const KINDS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array, f8: Float64Array };
function column(text) {
  const bytes = Uint8Array.from(atob(text.slice(3)), (c) => c.charCodeAt(0));
  return new KINDS[text.slice(0, 2)](bytes.buffer);
}
const COLOURS = {
  parameters: "#3f78b5", optimizer_state: "#8b5fb4", gradients: "#e0702b", activations: "#3a9a63",
  workspace: "#8a8f98", communication: "#b0486a", inputs: "#c9a21b", outputs: "#1fa3b3",
};
const PHASES = { forward: "#4a8fd4", backward: "#e0702b", update: "#3a9a63", recompute: "#c2379b", copy: "#8b6f47" };
const colourOf = D.categories.map((c) => COLOURS[c] || "#777777");

// ---- names: one tree, whose nodes are modules, instructions and buffers ------------------------------------------------
const tree = { text: column(D.tree.text), parent: column(D.tree.parent) };
const depthOf = new Uint16Array(tree.parent.length), fullNames = new Array(tree.parent.length), lowerNames = [];
fullNames[0] = "";
for (let n = 1; n < tree.parent.length; n++) {  // a parent comes before its children
  depthOf[n] = depthOf[tree.parent[n]] + 1;
  fullNames[n] = fullNames[tree.parent[n]] + D.texts[tree.text[n]];
}
const partOf = (node) => D.texts[tree.text[node]].replace(/^[./]+/, "");
function ancestor(node, depth) {
  while (depthOf[node] > depth) node = tree.parent[node];
  return node;
}
function isWithin(node, module) {
  return ancestor(node, depthOf[module]) === module;
}

// ---- plans -----------------------------------------------------------------------------------------------------------
function decode(data) {
  const p = { ...data, steps: {}, buffers: {} };
  for (const [key, text] of Object.entries(data.steps)) p.steps[key] = text === null ? null : column(text);
  for (const [key, text] of Object.entries(data.buffers)) p.buffers[key] = column(text);
  const b = p.buffers, n = b.name.length;
  p.count = n;
  p.length = Math.max(1, p.steps.name.length);
  p.at = Float64Array.from(b.offset, (offset, i) => data.base[b.region[i]] + offset);
  p.bySize = Int32Array.from({ length: n }, (_, i) => i).sort((x, y) => b.nbytes[x] - b.nbytes[y] || y - x);
  const seen = D.categories.map(() => 0);
  p.shade = Uint8Array.from({ length: n }, (_, i) => seen[b.category[i]]++ & 1);
  const places = Float64Array.from({ length: p.length + 1 }, (_, i) => i);
  p.edges = { steps: p.steps.place || places, time: p.steps.time };
  if (p.edges.steps.length < p.length + 1) p.edges.steps = places;  // a plan without instructions
  p.live = liveBytes(p);
  p.total = new Float64Array(p.length);
  for (const row of p.live) for (let s = 0; s < p.length; s++) p.total[s] += row[s];
  p.lives = livesOf(b);
  p.lanes = D.phases.map((_, phase) => runsOf(p.steps.phase, (each) => each === phase));
  p.levels = levelsOf(p.steps.name);
  return p;
}
function liveBytes(p) {
  const b = p.buffers, live = D.categories.map(() => new Float64Array(p.length + 1));
  for (let i = 0; i < p.count; i++) {
    if (!p.counted[b.region[i]]) continue;
    const grain = p.grain[b.region[i]], taken = Math.ceil(b.nbytes[i] / grain) * grain;
    live[b.category[i]][b.lower[i]] += taken;
    live[b.category[i]][b.upper[i]] -= taken;
  }
  for (const row of live) for (let s = 1; s <= p.length; s++) row[s] += row[s - 1];
  return live;
}
// Buffers of one thing: a value that is kept, dropped and computed again, or copied to the host and back.
function livesOf(b) {
  const of = new Map();
  for (let i = 0; i < b.thing.length; i++) {
    if (b.thing[i] < 0) continue;
    if (of.has(b.thing[i])) of.get(b.thing[i]).push(i); else of.set(b.thing[i], [i]);
  }
  return of;
}
function runsOf(row, wanted) {
  const runs = [];
  for (let s = 0; s < row.length; s++) {
    if (!wanted(row[s])) continue;
    if (runs.length && runs[runs.length - 1] === s) runs[runs.length - 1] = s + 1; else runs.push(s, s + 1);
  }
  return Int32Array.from(runs);
}
// By depth in the tree of names: runs of neighbouring instructions of one module, as [first, end, node, …].
function levelsOf(names) {
  const levels = [];
  for (let s = 0; s < names.length; s++) {
    for (let node = names[s]; node; node = tree.parent[node]) {
      const level = depthOf[node] - 1, runs = (levels[level] ||= []), end = runs.length;
      if (end && runs[end - 2] === s && runs[end - 1] === node) runs[end - 2] = s + 1; else runs.push(s, s + 1, node);
    }
  }
  return levels.map((runs) => Int32Array.from(runs));
}
const plans = D.plans.map(decode);
let P = plans[0], B = P.buffers;  // the plan in front, and its buffers
const readersOf = (i) => B.readers.subarray(i ? B.read[i - 1] : 0, B.read[i]);
const livesWith = (i) => (B.thing[i] < 0 ? [i] : P.lives.get(B.thing[i]));
const nameOf = (i) => fullNames[B.name[i]];
const shapeOf = (i) => D.shapes[B.shape[i]];
const stepName = (s) => (P.steps.name.length ? fullNames[P.steps.name[s]] : "");
const phaseOf = (s) => (P.steps.phase.length ? D.phases[P.steps.phase[s]] : "");

// ---- text -------------------------------------------------------------------------------------------------------------
const number = new Intl.NumberFormat("en-US");
const UNITS = ["KiB", "MiB", "GiB", "TiB"];
function iec(bytes) {
  let size = bytes, unit = "B";
  for (const next of UNITS) {
    if (Math.abs(size) < 1024) break;
    size /= 1024; unit = next;
  }
  return unit === "B" ? `${bytes} B` : `${size >= 100 ? size.toFixed(1) : size.toFixed(2)} ${unit}`;
}
function duration(nanoseconds) {
  let time = nanoseconds, unit = "ns";
  for (const next of ["µs", "ms", "s"]) {
    if (Math.abs(time) < 1000) break;
    time /= 1000; unit = next;
  }
  return unit === "ns" ? `${Math.round(time)} ns` : `${+time.toPrecision(4)} ${unit}`;
}
const exact = (bytes) => (bytes < 1024 ? `${bytes} B` : `${iec(bytes)} (${number.format(bytes)} bytes)`);
const step = (s) => (s >= P.length ? "the end" : `${s} ${stepName(s)}`.trim());
const words = (text) => text.replace("_", " ");
function make(tag, text, cls) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (cls) element.className = cls;
  return element;
}
