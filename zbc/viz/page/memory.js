// ---- memory: what each rank holds, the hovered one in front --------------------------------------------------
const curves = new Map();
function curveOf(row) {
  if (curves.has(row)) return curves.get(row);
  const panel = D.panels[row.panel], changes = [];
  for (let i = 0; i < row.n; i++) {
    const units = partOf(panel.held[row.k[i]][row.s[i]], row.m[i]);
    changes.push([kindOf(row, i).fills_at_start ? row.start[i] : row.end[i], units]);
  }
  if (row.more) {  // by what runs beside these ops
    changes.push(...row.more);
    changes.sort((one, two) => one[0] - two[0]);
  }
  const times = new Float64Array(changes.length), held = new Float64Array(changes.length);
  let now = 0, peak = 0;
  changes.forEach(([ms, units], i) => {
    now += units;
    times[i] = ms;
    held[i] = now;
    peak = Math.max(peak, now);
  });
  const curve = { times, held, peak };
  curves.set(row, curve);
  return curve;
}
function drawMemory() {
  const pen = memory.getContext("2d"), chosen = (state.hover || state.pinned || { row: rows[0] }).row;
  const most = Math.max(...rows.map((row) => curveOf(row).peak)) || 1, ground = MEMORY - 8, tall = MEMORY - 20;
  pen.fillStyle = color("--back");
  pen.fillRect(0, 0, width, MEMORY);
  const others = rows.length > 16 ? [] : rows;  // more lines would be a blot
  for (const row of others) if (row !== chosen) drawCurve(pen, row, ground, tall / most, color("--line"), 1);
  drawCurve(pen, chosen, ground, tall / most, color("--accent"), 2);
  pen.fillStyle = color("--ink");
  pen.font = "11px Helvetica,Arial,sans-serif";
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  pen.fillText(most.toPrecision(3), LEFT - 8, ground - tall);
  pen.fillText("0", LEFT - 8, ground);
  line(pen, [LEFT, ground], [width - RIGHT, ground], color("--line"), 1);
  $("held").textContent = "activations held, in shares of one microbatch per rank; in front rank " + chosen.rank +
    (D.panels.length > 1 ? " of " + D.panels[chosen.panel].title : "") + ", peak " + curveOf(chosen).peak.toPrecision(3);
}
function drawCurve(pen, row, ground, unit, style, thick) {
  const { times, held } = curveOf(row);
  pen.save();
  clip(pen, MEMORY);
  pen.beginPath();
  let i = Math.max(0, (row.more ? times.filter((ms) => ms < state.a).length : firstAfter(row, state.a)) - 1), at = LEFT;
  let y = ground - (i > 0 ? held[i - 1] : 0) * unit, high = y, low = y;
  pen.moveTo(LEFT, y);
  const settle = () => { pen.lineTo(at, high); pen.lineTo(at, low); pen.lineTo(at, y); };
  for (; i < times.length && times[i] < state.b; i++) {
    const x = xOf(times[i]), next = ground - held[i] * unit;
    if (x - at >= 1) {  // changes within a pixel are one stroke from the highest to the lowest
      settle();
      pen.lineTo(x, y);
      at = x;
      high = low = y;
    }
    high = Math.min(high, next);
    low = Math.max(low, next);
    y = next;
  }
  settle();
  pen.lineTo(Math.min(width, xOf(Math.max(state.b, full))), y);
  pen.strokeStyle = style;
  pen.lineWidth = thick;
  pen.stroke();
  pen.restore();
}
