// ---- the same in Perfetto: a process per panel, a thread per rank --------------------------------------------
const PERFETTO = "https://ui.perfetto.dev";
function trace() {
  const events = D.panels.map((panel, p) => ({ ph: "M", pid: p, name: "process_name", args: { name: panel.title } }));
  for (const row of rows) {
    events.push({ ph: "M", pid: row.panel, tid: row.rank, name: "thread_name", args: { name: "rank " + row.rank } });
    for (let i = 0; i < row.n; i++) {
      const ts = 1e3 * row.start[i], dur = 1e3 * (row.end[i] - row.start[i]);
      events.push({ ph: "X", pid: row.panel, tid: row.rank, name: opText(row, i), cat: kindOf(row, i).op, ts, dur });
    }
  }
  return { traceEvents: events, displayTimeUnit: "ms" };
}
// Its page says PONG to a PING once it is there; then it takes the bytes. Nothing goes to a server.
function toPerfetto() {
  const other = window.open(PERFETTO), buffer = new TextEncoder().encode(JSON.stringify(trace())).buffer;
  if (!other) return;
  const ask = setInterval(() => other.postMessage("PING", PERFETTO), 100);
  window.addEventListener("message", function answer(event) {
    if (event.origin !== PERFETTO || event.data !== "PONG") return;
    clearInterval(ask);
    window.removeEventListener("message", answer);
    other.postMessage({ perfetto: { buffer, title: document.title } }, PERFETTO);
  });
}
$("perfetto").onclick = toPerfetto;
