"use strict";
// One picture of one plan or several: rows of ops on a canvas, their memory below. Times are ms from the first start.
const D = JSON.parse(document.getElementById("data").textContent);
const LEFT = 46, RIGHT = 12, HEAD = 20, AXIS = 22, MEMORY = 130;
const $ = (id) => document.getElementById(id);
const canvas = $("time"), memory = $("memory"), tip = $("tip");

// ---- the data: flat arrays per row, ids counting through the rows of a panel --------------------------------
const rows = [];
for (const [p, panel] of D.panels.entries()) {
  let id = 0;
  panel.rows = panel.ranks.map((raw, k) => {
    const n = raw.k.length, start = new Float64Array(n), end = new Float64Array(n);
    let at = 0;
    for (let i = 0; i < n; i++) {
      start[i] = at + raw.g[i] * D.unit;
      at = end[i] = start[i] + panel.durations[raw.d[i]];
    }
    const row = { panel: p, rank: panel.names[k], k: raw.k, s: raw.s, m: raw.m, u: raw.u, x: raw.x, w: raw.w, start, end, first: id, n, more: raw.more };
    id += n;
    row.index = rows.push(row) - 1;
    return row;
  });
  panel.source = Int32Array.from(panel.source);
  panel.feeds = new Int32Array(id).fill(-1);  // the op on another rank that an op feeds
  panel.rowOf = (i) => {
    let low = 0, high = panel.rows.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (panel.rows[middle].first <= i) low = middle; else high = middle - 1;
    }
    return panel.rows[low];
  };
  panel.source.forEach((j, i) => { if (j >= 0 && panel.rowOf(j) !== panel.rowOf(i)) panel.feeds[j] = i; });
  panel.onPath = new Set(panel.path);
}
const kindOf = (row, i) => D.kinds[row.k[i]];
const HALVES = ["B", "W"].map((op) => D.kinds.find((kind) => kind.op === op));  // of a BW, where they are drawn apart
const pipeOf = (row, i) => (row.u ? row.u[i] : 0);
const partOf = (entry, mb) => (Array.isArray(entry) ? entry[mb % entry.length] : entry);  // of unequal microbatches
const chunkOf = (row, i) => D.panels[row.panel].chunks[row.rank][pipeOf(row, i) * 100000 + row.s[i]] || 0;
function opText(row, i) {
  const slice = row.x && row.x[i] ? "." + row.x[i] : "";
  if (kindOf(row, i).alone) return kindOf(row, i).op + " s" + row.s[i];
  const share = row.w && row.w[i] < 100 ? " " + row.w[i] + "%" : "";
  return kindOf(row, i).op + " s" + row.s[i] + " m" + row.m[i] + slice + (pipeOf(row, i) ? " up" : "") + share;
}
function labelOf(row, i, kind = kindOf(row, i)) {
  const letter = pipeOf(row, i) ? kind.other : kind.letter;
  if (kind.alone) return letter;
  return (chunkOf(row, i) % 2 ? letter.toLowerCase() : letter) + row.m[i];
}

// ---- the view ------------------------------------------------------------------------------------------------
const full = D.length || 1;
const state = { a: 0, b: full, hover: null, pinned: null, matches: [], match: -1, path: false, drawMs: 0 };
let width = 0, height = 0, rowHeight = 18, tops = [];
const base = document.createElement("canvas");  // the picture without what the pointer adds; kept while only that changes
let colors = {}, stale = true;
const color = (name) => colors[name];
function readColors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["--back", "--ink", "--line", "--row", "--accent"]) colors[name] = style.getPropertyValue(name).trim();
}

function layout() {
  const ratio = window.devicePixelRatio || 1;
  width = canvas.clientWidth;
  rowHeight = Math.max(9, Math.min(24, Math.floor((window.innerHeight - 330) / rows.length)));
  let y = 4;
  tops = rows.map((row, r) => {
    if (D.panels.length > 1 && (r === 0 || rows[r - 1].panel !== row.panel)) y += HEAD;
    const top = y;
    y += rowHeight + 2;
    return top;
  });
  height = y + AXIS;
  stale = true;
  for (const [one, tall] of [[canvas, height], [memory, MEMORY], [base, height]]) {
    one.style.height = tall + "px";
    one.width = Math.round(width * ratio);
    one.height = Math.round(tall * ratio);
    one.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  }
}
const scale = () => (width - LEFT - RIGHT) / (state.b - state.a);
const xOf = (ms) => LEFT + (ms - state.a) * scale();
const msAt = (x) => state.a + (x - LEFT) / scale();

function look(a, b) {
  const span = Math.min(full * 1.04, Math.max(full * 1e-7, b - a));
  a = Math.max(-0.02 * full, Math.min(a, full * 1.02 - span));
  state.a = a;
  state.b = a + span;
  stale = true;
  redraw();
}
function zoom(factor, x = (LEFT + width) / 2) {
  const at = msAt(x);
  look(at - (at - state.a) * factor, at + (state.b - at) * factor);
}
let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; draw(); });
}

// ---- drawing -------------------------------------------------------------------------------------------------
function firstAfter(row, ms) {  // the first op that ends after ms
  let low = 0, high = row.n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.end[middle] <= ms) low = middle + 1; else high = middle;
  }
  return low;
}
function draw() {
  const began = performance.now(), pen = canvas.getContext("2d");
  if (stale) drawBase(base.getContext("2d"));
  stale = false;
  pen.drawImage(base, 0, 0, width, height);
  pen.save();
  clip(pen, height);
  for (const one of [state.pinned, state.hover]) if (one) drawLinks(pen, one);
  pen.restore();
  drawMemory();
  state.drawMs = performance.now() - began;
}
function clip(pen, tall) {
  pen.beginPath();
  pen.rect(LEFT, 0, width - LEFT - RIGHT, tall);
  pen.clip();
}
function drawBase(pen) {
  const s = scale();
  pen.fillStyle = color("--back");
  pen.fillRect(0, 0, width, height);
  pen.save();
  clip(pen, height);
  const matched = new Set(state.matches.map((hit) => hit.row.index + ":" + hit.i));
  for (const row of rows) drawRow(pen, row, s, matched);
  if (state.path) drawPaths(pen);
  pen.restore();
  pen.textBaseline = "middle";
  pen.fillStyle = color("--ink");
  pen.font = Math.min(11, rowHeight) + "px Helvetica,Arial,sans-serif";
  rows.forEach((row, r) => {
    pen.textAlign = "right";
    pen.fillText(String(row.rank), LEFT - 8, tops[r] + rowHeight / 2 + 0.5);
    if (D.panels.length > 1 && (r === 0 || rows[r - 1].panel !== row.panel)) {
      pen.textAlign = "left";
      pen.fillText(D.panels[row.panel].title, 8, tops[r] - HEAD / 2);
    }
  });
  drawAxis(pen, height - AXIS, color("--ink"));
}
function drawRow(pen, row, s, matched) {
  const top = tops[row.index], panel = D.panels[row.panel], dim = state.path || state.matches.length > 0;
  pen.fillStyle = color("--row");
  pen.fillRect(LEFT, top, width - LEFT, rowHeight);
  pen.font = Math.min(11, rowHeight - 2) + "px Helvetica,Arial,sans-serif";
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  let last = -1;
  for (let i = firstAfter(row, state.a); i < row.n && row.start[i] < state.b; i++) {
    const x = xOf(row.start[i]), wide = (row.end[i] - row.start[i]) * s;
    if (x + wide < last + 0.8) continue;  // within a pixel that is drawn already
    last = x + wide;
    const kind = kindOf(row, i);
    if (dim) {
      const chosen = (state.path && panel.onPath.has(row.first + i)) || matched.has(row.index + ":" + i);
      pen.globalAlpha = chosen ? 1 : 0.3;
    }
    const share = kind.op === "BW" ? panel.apart[row.s[i]] || 1 : 1, middle = x + wide * share;
    const parts = share === 1 ? [[kind, x, wide]] : [[HALVES[0], x, middle - x], [HALVES[1], middle, x + wide - middle]];
    for (const [part, from, room] of parts) {
      pen.fillStyle = part.fills[row.m[i] % 2];
      pen.fillRect(from, top, Math.max(0.8, room - (room > 4 ? 0.7 : 0)), rowHeight);
    }
    if (wide < 9) continue;
    pen.fillStyle = kind.ink;
    if (pipeOf(row, i)) for (let d = 0; d < wide; d += 6) pen.fillRect(x + d, top, 1.2, rowHeight);
    const chunk = rowHeight > 12 ? chunkOf(row, i) : 0;
    if (chunk & 1) pen.fillRect(x, top + rowHeight - 3.5, wide - 0.7, 2);
    if (chunk & 2) pen.fillRect(x, top + 1.5, wide - 0.7, 2);
    for (const [part, from, room] of parts) {
      const text = labelOf(row, i, part), fits = [text, text.slice(1)].find((one) => pen.measureText(one).width <= room - 3);
      pen.fillStyle = part.ink;
      if (fits) pen.fillText(fits, from + room / 2, top + rowHeight / 2);
    }
  }
  pen.globalAlpha = 1;
  for (const sum of panel.sums) {
    if (sum.rank !== row.rank) continue;
    pen.fillStyle = sum.fill;
    pen.fillRect(xOf(sum.start), top + rowHeight * 0.7, (sum.end - sum.start) * s, rowHeight * 0.3);
  }
}
function middle(panel, i, end) {
  const row = panel.rowOf(i), k = i - row.first;
  return [xOf(end ? row.end[k] : row.start[k]), tops[row.index] + rowHeight / 2];
}
function line(pen, from, to, style, thick) {
  pen.strokeStyle = style;
  pen.lineWidth = thick;
  pen.beginPath();
  pen.moveTo(from[0], from[1]);
  pen.lineTo(to[0], to[1]);
  pen.stroke();
}
function drawPaths(pen) {
  for (const panel of D.panels) {
    for (let k = 0; k + 1 < panel.path.length; k++) {
      const later = panel.path[k], earlier = panel.path[k + 1];
      if (panel.rowOf(later) === panel.rowOf(earlier)) continue;
      line(pen, middle(panel, earlier, true), middle(panel, later, false), color("--accent"), 1.4);
    }
  }
}
function drawLinks(pen, { row, i }) {
  const panel = D.panels[row.panel], id = row.first + i, accent = color("--accent");
  const x = xOf(row.start[i]), wide = (row.end[i] - row.start[i]) * scale();
  pen.strokeStyle = accent;
  pen.lineWidth = 2;
  pen.strokeRect(x, tops[row.index], Math.max(2, wide), rowHeight);
  if (panel.source[id] >= 0) line(pen, middle(panel, panel.source[id], true), [x, tops[row.index] + rowHeight / 2], accent, 1.6);
  if (panel.feeds[id] >= 0) line(pen, [x + wide, tops[row.index] + rowHeight / 2], middle(panel, panel.feeds[id], false), accent, 1.6);
}
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((f) => f * power).find((f) => f >= value * (1 - 1e-9));
}
function drawAxis(pen, y, ink) {
  const every = roundUp(80 / scale()), digits = Math.max(0, -Math.floor(Math.log10(every) + 1e-9));
  pen.fillStyle = ink;
  pen.strokeStyle = color("--line");
  pen.font = "11px Helvetica,Arial,sans-serif";
  pen.textAlign = "center";
  pen.textBaseline = "top";
  for (let n = Math.ceil(state.a / every - 1e-9); n * every <= state.b; n++) {
    const x = xOf(n * every);
    if (x < LEFT - 1) continue;
    line(pen, [x, y], [x, y + 4], color("--line"), 1);
    pen.fillText((n * every).toFixed(digits), Math.min(x, width - 24), y + 6);
  }
  pen.textAlign = "right";
  pen.fillText("ms", LEFT - 14, y + 6);
}
