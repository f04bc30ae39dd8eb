// ---- what the pointer is on ----------------------------------------------------------------------------------
function hit(x, y) {
  if (x < LEFT) return null;
  const r = tops.findIndex((top) => y >= top && y < top + rowHeight);
  if (r < 0) return null;
  const row = rows[r], ms = msAt(x), i = firstAfter(row, ms);
  return i < row.n && row.start[i] <= ms ? { row, i } : null;
}
const round = (ms) => Number(ms.toPrecision(6)).toString() + " ms";
function described({ row, i }) {
  const panel = D.panels[row.panel], id = row.first + i, source = panel.source[id], begin = row.start[i];
  const lines = ["rank " + row.rank + ", " + kindOf(row, i).name, round(begin) + " to " + round(row.end[i]) + ", takes " + round(row.end[i] - begin)];
  const free = i > 0 ? row.end[i - 1] : 0;
  let arrival = 0;
  if (source >= 0) {
    const home = panel.rowOf(source), k = source - home.first, pipe = pipeOf(row, i);
    const away = home !== row, travel = away ? partOf(panel.comm[pipe][Math.min(row.s[i], home.s[k])], row.m[i]) : 0;
    arrival = home.end[k] + travel;
    const when = panel.waited ? ", which was done at " + round(home.end[k]) : ", which arrives at " + round(arrival);
    lines.push("needs " + opText(home, k) + (away ? " of rank " + home.rank + when : " of this rank"));
  } else lines.push("needs nothing of other ops");
  const tiny = full * 1e-7;
  if (panel.waited) {
    if (panel.waited[id] > 0) lines.push("waited " + round(panel.waited[id]) + " for it");
    if (panel.delayed[id] > 0) lines.push(round(panel.delayed[id]) + (panel.waited[id] > 0 ? " more" : "") + " for data and the runtime");
    if (panel.twin !== undefined) {
      const home = D.panels[panel.twin].rowOf(id), k = id - home.first;
      lines.push("predicted: " + round(home.start[k]) + " to " + round(home.end[k]) + ", takes " + round(home.end[k] - home.start[k]));
    }
  } else if (begin > free + tiny) {
    lines.push(i > 0 || begin > tiny ? "waited " + round(begin - free) + (source >= 0 && arrival > free + tiny ? " for " + opText(panel.rowOf(source), source - panel.rowOf(source).first) : " for the step to begin") : "starts the step");
  } else lines.push(i > 0 ? "started when the rank was done with " + opText(row, i - 1) : "starts the step");
  if (panel.feeds[id] >= 0) {
    const home = panel.rowOf(panel.feeds[id]);
    lines.push("feeds " + opText(home, panel.feeds[id] - home.first) + " of rank " + home.rank);
  }
  if (panel.onPath.has(id)) lines.push("on the critical path");
  return { head: opText(row, i), lines };
}
function show(at, x, y) {
  if (!at) { tip.style.display = "none"; return; }
  const { head, lines } = described(at);
  tip.textContent = "";
  const strong = document.createElement("b");
  strong.textContent = head;
  tip.append(strong, "\n" + lines.join("\n"));
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, window.innerWidth - box.width - 8)) + "px";
  tip.style.top = Math.max(4, y + 18 + box.height > window.innerHeight ? y - box.height - 12 : y + 18) + "px";
}
let dragged = null;
canvas.addEventListener("pointermove", (event) => {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  if (dragged) {
    const shift = (dragged.x - x) / scale();
    dragged.far = dragged.far || Math.abs(dragged.x - x) > 3;
    look(dragged.a + shift, dragged.b + shift);
    return;
  }
  const now = hit(x, y);
  const same = now && state.hover && now.row === state.hover.row && now.i === state.hover.i;
  state.hover = now;
  show(now, event.clientX, event.clientY);
  if (!same) redraw();
});
canvas.addEventListener("pointerdown", (event) => {
  dragged = { x: event.clientX - canvas.getBoundingClientRect().left, a: state.a, b: state.b, far: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointerup", () => {
  if (dragged && !dragged.far) { state.pinned = state.hover; redraw(); }
  dragged = null;
});
canvas.addEventListener("pointerleave", () => { state.hover = null; show(null); redraw(); });
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const x = event.clientX - canvas.getBoundingClientRect().left;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const shift = ((event.deltaX || event.deltaY) / 500) * (state.b - state.a);
    look(state.a + shift, state.b + shift);
  } else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 400))), x);
}, { passive: false });

// ---- finding -------------------------------------------------------------------------------------------------
function find(text) {
  const words = text.trim().split(/\s+/).filter(Boolean), wanted = {};
  state.matches = [];
  state.match = -1;
  for (const word of words) {
    const part = /^([smr])(\d+)$/i.exec(word);
    if (part) wanted[part[1].toLowerCase()] = Number(part[2]);
    else if (/^up$/i.test(word)) wanted.up = 1;
    else wanted.op = word.toUpperCase();
  }
  const known = wanted.op === undefined || D.kinds.some((kind) => kind.op === wanted.op);
  if (words.length && known) {
    for (const row of rows) {
      if (wanted.r !== undefined && row.rank !== wanted.r) continue;
      for (let i = 0; i < row.n; i++) {
        if (wanted.op !== undefined && kindOf(row, i).op !== wanted.op) continue;
        if (wanted.s !== undefined && row.s[i] !== wanted.s) continue;
        if (wanted.m !== undefined && row.m[i] !== wanted.m) continue;
        if (wanted.up && !pipeOf(row, i)) continue;
        state.matches.push({ row, i });
      }
    }
    state.matches.sort((one, two) => one.row.start[one.i] - two.row.start[two.i]);
  }
  $("found").textContent = !words.length ? "" : !known ? "no such kind of op" : state.matches.length + " found" + (state.matches.length ? ", Enter shows the next" : "");
  stale = true;
  redraw();
}
function next() {
  if (!state.matches.length) return;
  state.match = (state.match + 1) % state.matches.length;
  const { row, i } = state.matches[state.match], middle = (row.start[i] + row.end[i]) / 2;
  const span = Math.min(state.b - state.a, Math.max((row.end[i] - row.start[i]) * 40, full * 1e-5));
  state.pinned = state.matches[state.match];
  look(middle - span / 2, middle + span / 2);
  $("found").textContent = state.match + 1 + " of " + state.matches.length;
}

// ---- buttons and keys ----------------------------------------------------------------------------------------
function paths() {
  state.path = !state.path;
  $("path").setAttribute("aria-pressed", String(state.path));
  stale = true;
  redraw();
}
function theme(name) {
  document.documentElement.dataset.theme = name;
  readColors();
  stale = true;
  $("theme").textContent = name === "dark" ? "light" : "dark";
  redraw();
}
const swap = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
const fit = () => look(-0.01 * full, 1.01 * full);
const pan = (share) => { const by = share * (state.b - state.a); look(state.a + by, state.b + by); };
$("fit").onclick = fit;
$("in").onclick = () => zoom(0.6);
$("out").onclick = () => zoom(1 / 0.6);
$("path").onclick = paths;
$("theme").onclick = swap;
$("find").addEventListener("input", (event) => find(event.target.value));
$("find").addEventListener("keydown", (event) => {
  if (event.key === "Enter") next();
  if (event.key === "Escape") { event.target.value = ""; find(""); event.target.blur(); }
  event.stopPropagation();
});
const keys = { c: paths, f: fit, "0": fit, "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), t: swap,
  ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "/": () => $("find").focus(),
  Escape: () => { state.pinned = null; redraw(); } };
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
window.addEventListener("resize", () => { layout(); redraw(); });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => theme(event.matches ? "dark" : "light"));
theme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
layout();
look(-0.01 * full, 1.01 * full);
window.zbc = { state, rows, redrawAll: () => { stale = true; draw(); }, xOf, tops: () => tops, rowHeight: () => rowHeight, draw, hit, described, find, look };
