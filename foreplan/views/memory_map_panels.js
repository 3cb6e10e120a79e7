// ---- panels: what is picked, what was found, what is alive ----------------------------------------------------------------
function swatch(category) {
  const element = make("span", undefined, "swatch");
  element.style.background = colourOf[category];
  return element;
}
function heading(tag, i) {
  const element = make(tag);
  element.append(swatch(B.category[i]), make("span", nameOf(i)));
  return element;
}
function factsOf(rows) {
  const list = make("dl", undefined, "facts");
  for (const [key, value] of rows) {
    const told = make("dd");
    told.append(value);
    list.append(make("dt", key), told);
  }
  return list;
}
function facts(i) {
  const last = Math.max(B.lower[i], B.upper[i] - 1), readers = readersOf(i), lives = livesWith(i);
  const rows = [["bytes", exact(B.nbytes[i])]];
  if (shapeOf(i)) rows.unshift(["shape", shapeOf(i)]);
  rows.push(["category", words(D.categories[B.category[i]])]);
  rows.push(["lifetime", `[${B.lower[i]}, ${B.upper[i]}): ${B.upper[i] - B.lower[i]} instructions${lasting(i)}`]);
  if (lives.length > 1) rows.push(["life", `${lives.indexOf(i) + 1} of ${lives.length}`]);
  rows.push(["first", step(B.lower[i])], ["last", step(last)]);
  rows.push(["offset", `${number.format(B.offset[i])} in ${P.regions[B.region[i]]}`]);
  if (B.written[i] >= 0) rows.push(["written by", step(B.written[i])]);
  rows.push(["readers", number.format(readers.length)]);
  return factsOf(rows);
}
function lasting(i) {
  const time = P.edges.time;
  return time ? `, ${duration(time[B.upper[i]] - time[B.lower[i]])}` : "";
}
function liveFacts(s) {
  const rows = [["live", exact(P.total[s])]];
  if (phaseOf(s)) rows.push(["phase", phaseOf(s)]);
  if (P.edges.time) rows.push(["predicted", `${duration(P.edges.time[s + 1] - P.edges.time[s])}, from ${duration(P.edges.time[s])} on`]);
  D.categories.forEach((category, c) => {
    if (P.live[c][s]) rows.push([words(category), iec(P.live[c][s])]);
  });
  return factsOf(rows);
}
function button(text, act, cls = "row") {
  const element = make("button", text, cls);
  element.type = "button";
  element.addEventListener("click", act);
  return element;
}
function listOf(title, rows) {
  const box = make("div", undefined, "scroll");
  box.append(...rows);
  return [make("h3", title), box];
}
function drawPicked() {
  const panel = $("picked");
  if (picked < 0) {
    panel.replaceChildren(make("h2", P.length ? `instruction ${step(cursor)}` : "no instructions"), liveFacts(cursor));
    return;
  }
  const lives = livesWith(picked), readers = readersOf(picked), parts = [heading("h2", picked), facts(picked)];
  if (lives.length > 1) {
    parts.push(...listOf(`${lives.length} lives of this value`, lives.map((i) => {
      const away = P.counted[B.region[i]] ? "" : `, in ${P.regions[B.region[i]]} memory`;
      const how = B.written[i] < 0 ? "there before" : `${phaseOf(B.written[i])} ${step(B.written[i])}`;
      return button(`[${B.lower[i]}, ${B.upper[i]})${away}: ${how}`, () => { reveal(i); pick(i, B.lower[i]); }, i === picked ? "row on" : "row");
    })));
  }
  if (readers.length)
    parts.push(...listOf(`all ${readers.length} readers`, Array.from(readers, (s) => button(step(s), () => { show(s); pick(picked, s); }, s === cursor ? "row on" : "row"))));
  panel.replaceChildren(...parts);
}

// ---- search: words of a name, in:module, >bytes, <bytes -----------------------------------------------------------------
function asBytes(text) {
  const match = /^([\d.]+)\s*(?:(b)|([kmgt])i?b?)?$/i.exec(text);
  return match ? Number(match[1]) * (match[3] ? 1024 ** ("kmgt".indexOf(match[3].toLowerCase()) + 1) : 1) : NaN;
}
function testOf(word) {
  const limit = /^[<>]=?/.exec(word);
  if (limit && asBytes(word.slice(limit[0].length)) >= 0) {
    const bytes = asBytes(word.slice(limit[0].length));
    if (limit[0][0] === ">") return (i) => B.nbytes[i] > bytes || (limit[0] === ">=" && B.nbytes[i] === bytes);
    return (i) => B.nbytes[i] < bytes || (limit[0] === "<=" && B.nbytes[i] === bytes);
  }
  if (word.startsWith("in:")) {
    const module = word.slice(3).replace(/^\/+/, "");
    const own = (name) => name.toLowerCase().replace(/^\/+/, "");
    return (i) => {
      const name = own(nameOf(i));
      return name.startsWith(module) && (name.length === module.length || "./ ".includes(name[module.length]));
    };
  }
  return (i) => (lowerNames[B.name[i]] ??= nameOf(i).toLowerCase()).includes(word);
}
function search(text) {
  const tests = text.trim().toLowerCase().split(/\s+/).filter(Boolean).map(testOf);
  if ($("search").value !== text) $("search").value = text;
  found = null;
  if (tests.length) {
    found = new Set();
    for (let k = P.count - 1; k >= 0; k--) if (tests.every((test) => test(P.bySize[k]))) found.add(P.bySize[k]);
  }
  drawFound();
  redraw();
}
function drawFound() {
  const panel = $("found");
  panel.hidden = found === null;
  $("matches").textContent = found ? `${number.format(found.size)} of ${number.format(P.count)}` : "";
  if (!found) return;
  const rows = [], most = 200;
  for (const i of found) {
    if (rows.length === most) break;
    const row = button(undefined, () => { reveal(i); pick(i, B.lower[i]); }, i === picked ? "row on" : "row");
    row.append(swatch(B.category[i]), make("span", nameOf(i), "grow"), make("span", iec(B.nbytes[i])));
    rows.push(row);
  }
  let sum = 0;
  const change = new Float64Array(P.length + 1);
  for (const i of found) {
    sum += B.nbytes[i];
    change[B.lower[i]] += B.nbytes[i];
    change[B.upper[i]] -= B.nbytes[i];
  }
  let alive = 0, highest = 0;
  for (const delta of change) { alive += delta; highest = Math.max(highest, alive); }
  const head = make("h2", `${number.format(found.size)} found, ${iec(sum)}`);
  const told = [make("p", `${iec(highest)} of them at once`, "quiet")];
  if (found.size > most) told.push(make("p", `the ${most} largest:`, "quiet"));
  const box = make("div", undefined, "scroll");
  box.append(...rows);
  panel.replaceChildren(head, ...told, box);
}

// ---- tables --------------------------------------------------------------------------------------------------------------
function table(titles, rows) {
  const head = make("thead"), row = make("tr"), body = make("tbody"), whole = make("table");
  for (const title of titles) row.append(make("th", title, title === "bytes" ? "bytes" : ""));
  head.append(row);
  body.append(...rows);
  whole.append(head, body);
  return whole;
}
function drawAlive() {
  const most = 60, alive = [];
  for (let k = P.count - 1; k >= 0; k--) {
    const i = P.bySize[k];
    if (B.lower[i] <= cursor && cursor < B.upper[i]) alive.push(i);
  }
  const rows = alive.slice(0, most).map((i) => {
    const row = make("tr", undefined, i === picked ? "on" : ""), name = make("td"), box = make("span", undefined, "name");
    box.append(swatch(B.category[i]), make("span", nameOf(i)));
    name.append(box);
    row.append(name, make("td", shapeOf(i), "quiet whole"), make("td", iec(B.nbytes[i]), "bytes"),
      make("td", `[${B.lower[i]}, ${B.upper[i]})`, "whole"), make("td", B.written[i] >= 0 ? stepName(B.written[i]) : "", "quiet"));
    row.addEventListener("click", () => { reveal(i); pick(i, cursor); });
    return row;
  });
  const where = cursor === P.peak ? "the peak, " : "";
  const parts = [make("h2", `${number.format(alive.length)} buffers alive at ${where}${step(cursor)}`),
    table(["buffer", "shape", "bytes", "lifetime", "written by"], rows)];
  const rest = alive.slice(most).reduce((sum, i) => sum + B.nbytes[i], 0);
  if (rest) parts.push(make("p", `and ${number.format(alive.length - most)} smaller ones, ${iec(rest)} together`, "quiet"));
  $("alive").replaceChildren(...parts);
}
let module = 0;  // whose parts the table of modules shows; 0: the whole step
function drawModuleTable() {
  const sums = new Map(), depth = depthOf[module] + 1;
  for (let i = 0; i < P.count; i++) {
    if (!(B.lower[i] <= cursor && cursor < B.upper[i]) || !P.counted[B.region[i]] || !isWithin(B.name[i], module)) continue;
    const node = ancestor(B.name[i], depth);
    sums.set(node, (sums.get(node) || 0) + B.nbytes[i]);
  }
  const rows = [...sums].sort((a, b) => b[1] - a[1]), all = rows.reduce((sum, each) => sum + each[1], 0);
  const shownRows = rows.slice(0, 30).map(([node, bytes]) => {
    const row = make("tr"), name = make("td"), share = make("td", undefined, "share"), bar = make("span", undefined, "bar");
    name.append(make("span", partOf(node) || fullNames[node] || "(no name)"));
    bar.style.width = `${(100 * bytes) / rows[0][1]}%`;
    share.append(bar);
    row.append(name, make("td", iec(bytes), "bytes"), share);
    row.addEventListener("click", () => toModule(node));
    return row;
  });
  const parts = [make("h2", `${iec(all)} alive ${module ? `in ${fullNames[module]}` : "by module"}`)];
  if (module) parts.push(button("Up", () => toModule(tree.parent[module]), ""));
  parts.push(table(["module", "bytes", ""], shownRows));
  if (rows.length > 30) parts.push(make("p", `and ${number.format(rows.length - 30)} smaller ones`, "quiet"));
  $("modules").replaceChildren(...parts);
}
function toModule(node) {
  module = node;
  search(node ? `in:${fullNames[node].replace(/^\/+/, "")}` : "");
  drawModuleTable();
}
function drawPanels() {
  drawPicked();
  drawFound();
  drawAlive();
  drawModuleTable();
}
function drawLegend() {
  const there = D.categories.map((_, c) => plans.some((p) => p.buffers.category.includes(c)));
  const chips = D.categories.map((category, c) => {
    const chip = button(undefined, () => {
      shown[c] = !shown[c];
      chip.setAttribute("aria-pressed", String(shown[c]));
      redraw();
    }, "chip");
    chip.title = "Bytes at the peak; click to hide or show";
    chip.setAttribute("aria-pressed", String(shown[c]));
    chip.append(swatch(c), make("span", words(category)), make("small", iec(P.live[c][P.peak] || 0)));
    chip.hidden = !there[c];
    return chip;
  });
  $("legend").replaceChildren(...chips);
}
function drawNotes() {
  $("notes").hidden = D.notes.length === 0;
  $("notes").append(make("h2", plans.length > 1 ? `Notes on ${plans[0].label}` : "Notes"), ...D.notes.map((note) => make("p", note)));
}
