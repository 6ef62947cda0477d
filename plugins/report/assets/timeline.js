"use strict";
// Activity of each process over time, as a row of bars, and the memory of the roles.

const LANE = 24, HEAD = 26, MANY_KINDS = 8;

function timelinePart(data) {
  const part = el("section", { id: "timeline", "aria-labelledby": "timeline-head" }, el("h2", { id: "timeline-head" }, "Timeline of the roles"));
  for (const run of data.runs) {
    if (data.runs.length > 1) part.append(el("h3", {}, run.name));
    part.append(run.timeline ? lanes(run.timeline) : el("p", { class: "soft" }, "No events were recorded (events.jsonl is missing or empty)."));
  }
  return part;
}

function lanes(line) {
  const rows = line.rows.map((row) => ({ ...row, begin: sums(row.b), share: row.s || null }));
  const total = new Array(line.kinds.length).fill(0);
  for (const row of rows) row.k.forEach((kind, i) => { total[kind] += row.d[i]; });
  const rank = [...total.keys()].sort((a, b) => total[b] - total[a]);
  const place = new Map(rank.map((kind, i) => [kind, i]));
  const view = { line, rows, from: line.training, to: line.end, kindColour: (kind) => place.get(kind) < MANY_KINDS ? colour(place.get(kind)) : css("--grey") };
  if (!(view.to > view.from)) view.from = 0;
  view.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": `Timeline: ${laneWords(line)}. Left and right arrow keys move, plus and minus zoom, 0 shows all.` });
  view.tip = el("div", { class: "tip", hidden: true });
  const labels = el("div", { class: "labels" }, rows.map((row) => el("div", {}, el("strong", {}, line.ranks[row.role] > 1 ? `${row.role} ${row.rank}` : row.role), el("span", { class: "soft" }, `idle ${percent(row.idle)}`))));
  const legend = el("div", { class: "legend small" });
  const box = el("div", { class: "card" }, laneTools(view), el("div", { class: "lanes" }, labels, el("div", {}, view.canvas)), legend, el("p", { class: "soft small" }, laneNotes(view)), callTable(line), view.tip);
  listen(view);
  repaints.push(() => drawLanes(view));
  repainted(() => {
    const named = rank.slice(0, MANY_KINDS).map((kind) => el("span", {}, el("span", { class: "dot", style: { background: view.kindColour(kind) } }), line.kinds[kind]));
    if (rank.length > MANY_KINDS) named.push(el("span", {}, el("span", { class: "dot", style: { background: css("--grey") } }), rank.slice(MANY_KINDS).map((kind) => line.kinds[kind]).join(", ")));
    legend.replaceChildren(...named);
  });
  new ResizeObserver(() => drawLanes(view)).observe(view.canvas.parentElement);
  return box;
}

function percent(share) {
  return `${Math.round(share * 100)} %`;
}

function laneWords(line) {
  return Object.entries(line.idle).map(([role, idle]) => `${role} was idle for ${percent(idle)}`).join(", ");
}

function laneTools(view) {
  const { line } = view;
  const edge = (label) => el("input", { type: "number", "aria-label": label, min: 0 });
  view.first = edge("From step");
  view.last = edge("To step");
  const apply = () => {
    show(view, endOf(line, Number(view.first.value) - 1), endOf(line, Number(view.last.value) || Infinity));
  };
  [view.first, view.last].forEach((input) => input.addEventListener("change", apply));
  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, onclick: act }, text);
  return el("div", { class: "tools" },
    line.steps.length > 0 && el("label", {}, "Steps", view.first, "to", view.last),
    button("+", "Zoom in", () => zoom(view, 0.5)), button("−", "Zoom out", () => zoom(view, 2)),
    button("◀", "Earlier", () => pan(view, -0.5)), button("▶", "Later", () => pan(view, 0.5)),
    button("Training", "Show the training", () => show(view, line.training, line.end)),
    button("Whole run", "Show the whole run", () => show(view, 0, line.end)));
}

function laneNotes(view) {
  const { line, rows } = view;
  const drawn = rows.reduce((sum, row) => sum + row.k.length, 0);
  const processes = Object.values(line.ranks).reduce((a, b) => a + b, 0);
  const notes = [`Idle: the share of the time since the first training phase in which a process had nothing to do. TRAINER's row shows its phases.`];
  if (processes > rows.length) notes.push(`${rows.length} of ${count(processes, "process", "processes")} are drawn.`);
  if (rows.some((row) => row.share)) notes.push(`${count(line.bars, "call")} are drawn as ${count(drawn, "bar")}: the first and the last calls one by one, the others merged. A merged bar shows the call that took longest, and is paler the more idle time it contains.`);
  if (line.starts.length > 1) notes.push(`The run was started ${line.starts.length} times (dashed lines). The time between the starts is not shown.`);
  return notes.join(" ");
}

function callTable(line) {
  const rows = [...line.calls].sort((a, b) => b[3] - a[3]).map(([role, what, n, together, longest, failed]) => [role, what, n.toLocaleString("en"), seconds(together), seconds(together / n), seconds(longest), failed ? String(failed) : ""]);
  return el("details", {}, el("summary", {}, "What took the time, as a table"), table(["role", "what", "times", "together", "mean", "longest", "failed"], rows, [2, 3, 4, 5, 6]));
}

function show(view, from, to) {
  const least = Math.min(0.005, view.line.end || 1);
  view.from = Math.max(0, Math.min(from, view.line.end - least));
  view.to = Math.min(view.line.end, Math.max(to, view.from + least));
  drawLanes(view);
}

function zoom(view, factor, at = 0.5) {
  const span = view.to - view.from, middle = view.from + span * at;
  show(view, middle - span * factor * at, middle + span * factor * (1 - at));
}

function pan(view, part) {
  const span = view.to - view.from;
  const from = Math.max(0, Math.min(view.line.end - span, view.from + span * part));
  show(view, from, from + span);
}

function drawLanes(view) {
  const { canvas, rows, line } = view;
  const width = canvas.parentElement.clientWidth, height = HEAD + rows.length * LANE + 2;
  if (!width) return;
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  const scale = width / (view.to - view.from);
  const x = (t) => (t - view.from) * scale;
  drawSteps(view, pen, x, width, height);
  rows.forEach((row, r) => {
    const top = HEAD + r * LANE;
    pen.fillStyle = css("--faint");
    pen.fillRect(0, top + 3, width, LANE - 6);
    for (let i = 0; i < row.k.length; i++) {
      const begin = x(row.begin[i] / 1000), size = Math.max(0.8, (row.d[i] / 1000) * scale);
      if (begin > width || begin + size < 0) continue;
      pen.globalAlpha = row.share ? 0.25 + 0.75 * row.share[i] : 1;
      pen.fillStyle = view.kindColour(row.k[i]);
      pen.fillRect(begin, top + 3, size > 4 ? size - 0.7 : size, LANE - 6);
      pen.globalAlpha = 1;
      const name = line.kinds[row.k[i]], left = Math.max(begin, 0), room = Math.min(begin + size, width) - left;
      if (room > 26 && pen.measureText(name).width < room - 8) {
        pen.fillStyle = theme() === "dark" ? "#101317" : "#ffffff";
        pen.fillText(name, left + 4, top + LANE / 2 + 4);
      }
    }
  });
  if (!line.steps.length) return;
  view.first.value = Math.min(stepsBy(line, view.from) + 1, line.steps.at(-1)[0]);
  view.last.value = stepsBy(line, view.to);
}

// Number of steps that had ended at a time. Long runs mark some steps only; it is interpolated between them.
function stepsBy(line, t) {
  const i = line.steps.findIndex(([, at]) => at > t + 1e-3);
  if (i < 0) return line.steps.at(-1)?.[0];
  const [next, end] = line.steps[i], [step, begin] = line.steps[i - 1] || [next - 1, end];
  if (!(next - step > 1 && end > begin)) return next - 1;
  return step + Math.floor((next - step) * Math.max(0, t - begin) / (end - begin) + 1e-6);
}

// Approximate time at which a step ended.
function endOf(line, step) {
  const i = line.steps.findIndex(([mark]) => mark >= step);
  if (i < 0) return line.steps.at(-1)[1];
  const [next, end] = line.steps[i], [before, begin] = line.steps[i - 1] || [next - 1, line.training];
  return begin + (end - begin) * Math.max(0, (step - before) / (next - before));
}

function drawSteps(view, pen, x, width, height) {
  pen.fillStyle = css("--soft");
  pen.strokeStyle = css("--line");
  let free = 0;
  for (const [step, t] of view.line.steps) {
    const at = x(t);
    if (at < 0 || at > width) continue;
    const text = `step ${step}`, size = pen.measureText(text).width;
    if (at - size / 2 < free) continue;
    pen.fillRect(at, HEAD - 6, 1, 6);
    pen.fillText(text, Math.min(at - size / 2, width - size), 14);
    free = at + size / 2 + 12;
  }
  if (free === 0) pen.fillText(`${seconds(view.from)} to ${seconds(view.to)}`, 4, 14);
  pen.setLineDash([4, 3]);
  for (const start of view.line.starts.slice(1)) {
    pen.beginPath();
    pen.moveTo(x(start), HEAD - 8);
    pen.lineTo(x(start), height);
    pen.strokeStyle = css("--ink");
    pen.stroke();
  }
  pen.setLineDash([]);
}

function listen(view) {
  const { canvas } = view;
  let drag = null;
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = { ArrowLeft: () => pan(view, -0.2), ArrowRight: () => pan(view, 0.2), "+": () => zoom(view, 0.6), "-": () => zoom(view, 1 / 0.6), 0: () => show(view, 0, view.line.end) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
    event.preventDefault();
    if (event.ctrlKey) zoom(view, event.deltaY > 0 ? 1.25 : 0.8, event.offsetX / canvas.clientWidth);
    else pan(view, event.deltaX / canvas.clientWidth);
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoom(view, 0.5, event.offsetX / canvas.clientWidth));
  canvas.addEventListener("pointerdown", (event) => { drag = event.clientX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (drag !== null) {
      pan(view, (drag - event.clientX) / canvas.clientWidth);
      drag = event.clientX;
    }
    pointAt(view, event);
  });
  canvas.addEventListener("pointerleave", () => { view.tip.hidden = true; });
}

function pointAt(view, event) {
  const { tip, canvas, rows, line } = view;
  const row = rows[Math.floor((event.offsetY - HEAD) / LANE)];
  const t = (view.from + (event.offsetX / canvas.clientWidth) * (view.to - view.from)) * 1000;
  const slack = ((view.to - view.from) * 1000 * 2) / canvas.clientWidth;
  const i = row ? row.begin.findIndex((begin, j) => begin - slack <= t && t <= begin + row.d[j] + slack) : -1;
  tip.hidden = i < 0;
  if (i < 0) return;
  const step = stepsBy(line, row.begin[i] / 1000) + 1;
  tip.textContent = `${row.role}${line.ranks[row.role] > 1 ? " " + row.rank : ""} · ${line.kinds[row.k[i]]} · ${seconds(row.d[i] / 1000)}${row.share && row.share[i] < 1 ? `, busy ${percent(row.share[i])}` : ""} · at ${seconds(row.begin[i] / 1000)}${step <= line.steps.at(-1)?.[0] ? `, in ${line.thinned ? "about " : ""}step ${step}` : ""}`;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 14}px`;
}

function memoryPart(data) {
  const runs = data.runs.filter((run) => run.memory);
  if (!runs.length) return null;
  const part = el("section", { id: "memory", "aria-labelledby": "memory-head" }, el("h2", { id: "memory-head" }, "Memory"));
  for (const run of runs) part.append(memoryChart(run, data.runs.length > 1));
  return part;
}

function memoryChart(run, named) {
  const roles = Object.keys(run.memory.gb);
  const plot = el("div", { class: "plot" }), legend = el("div", { class: "legend small" });
  const card = el("div", { class: "card" }, named && el("h3", {}, run.name), legend, plot, el("p", { class: "soft small" }, "Gigabytes of each role's processes, over the time of the run (minutes:seconds)."));
  let chart = null;
  const draw = () => {
    legend.replaceChildren(...roles.map((role, i) => el("span", {}, dot(i), `${role}, at most ${say(Number(Math.max(...run.memory.gb[role].map((v) => v ?? 0)).toPrecision(3)))} GB`)));
    if (chart) chart.destroy();
    if (!plot.clientWidth) return;
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    chart = new uPlot({
      width: plot.clientWidth, height: 170, legend: { show: false }, padding: [8, 10, 0, 0],
      scales: { x: { time: false }, y: { range: (u, low, high) => [0, (high || 1) * 1.06] } },
      series: [{}, ...roles.map((_, i) => ({ stroke: colour(i), width: 1.8, dash: DASHES[i % DASHES.length] }))],
      axes: [{ ...axis, size: 26, gap: 7, space: 70, incrs: [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 36000, 360000], values: (u, ticks) => ticks.map((t) => `${Math.floor(t / 60).toLocaleString("en")}:${String(Math.round(t % 60)).padStart(2, "0")}`) }, { ...axis, size: 52 }],
    }, [run.memory.t, ...roles.map((role) => run.memory.gb[role])], plot);
  };
  repaints.push(draw);
  new ResizeObserver(draw).observe(plot);
  return card;
}
