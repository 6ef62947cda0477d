"use strict";
// Curves in four rows. All charts share one cursor, one range of steps and one smoothing.

const FIRST_CHARTS = 8;
const charts = new Set();
const curveState = { smoothing: 0, all: null, shown: null };

// Exponential moving average. Missing values stay gaps.
function smooth(values, weight) {
  let sum = 0, total = 0;
  return values.map((v) => {
    if (v === null || v === undefined) return v;
    sum = sum * weight + v;
    total = total * weight + 1;
    return sum / total;
  });
}

function curvesPart(data) {
  const rows = { better: [], healthy: [], says: [], fast: [] };
  for (const [name, metric] of Object.entries(data.metrics)) rows[metric.row].push([name, metric]);
  const names = Object.keys(data.metrics);
  const part = el("section", { id: "curves", "aria-labelledby": "curves-head" }, el("h2", { id: "curves-head" }, "Curves"));
  if (!names.length) {
    part.append(el("p", { class: "soft" }, "No step has been recorded yet."));
    return part;
  }
  const ends = data.runs.flatMap((run) => Object.values(run.curves).map((curve) => [curve.x[0], sums(curve.x).at(-1)]));
  const min = Math.min(...ends.map((end) => end[0])), max = Math.max(...ends.map((end) => end[1]));
  curveState.shown = curveState.all = { min, max: max > min ? max : min + 1 };
  const cards = [];
  part.append(curveTools(data, (wanted) => filterCharts(cards, wanted)));
  for (const [row, members] of Object.entries(rows)) {
    members.sort((a, b) => still(data, a[0]) - still(data, b[0]));
    if (members.length) part.append(chartRow(data, row, members, cards));
  }
  part.append(el("p", { class: "soft small" }, curveNotes(data)));
  return part;
}

// Metrics that never change come last.
function still(data, name) {
  return Number(data.runs.every((run) => new Set(run.curves[name]?.y ?? []).size < 2));
}

function curveTools(data, filter) {
  const shown = el("output", { for: "smoothing" }, "none");
  const slider = el("input", { type: "range", id: "smoothing", min: 0, max: 0.98, step: 0.02, value: 0, oninput: () => {
    curveState.smoothing = Number(slider.value);
    shown.textContent = curveState.smoothing ? curveState.smoothing.toFixed(2) : "none";
    charts.forEach((chart) => chart.build());
  } });
  return el("div", { class: "tools" },
    el("label", {}, "Smoothing", slider, shown),
    el("label", {}, "Find", el("input", { type: "search", placeholder: "a metric", oninput: (event) => filter(event.target.value) })),
    el("button", { type: "button", onclick: allSteps }, "All steps"),
    el("span", { class: "soft small" }, "Drag over a chart to zoom in. Double-click to show all steps."),
    data.runs.length > 1 && runLegend(data));
}

function runLegend(data) {
  const legend = el("span", { class: "legend", "aria-label": "Runs" });
  repainted(() => legend.replaceChildren(...data.runs.map((run, i) => el("span", {}, dot(i), run.name))));
  return legend;
}

function filterCharts(cards, wanted) {
  for (const { card, name, extra } of cards) {
    card.hidden = wanted ? !name.toLowerCase().includes(wanted.toLowerCase()) : extra && !extra.open;
  }
}

function chartRow(data, row, members, cards) {
  const grid = el("div", { class: "charts" });
  const extra = { open: false };
  members.forEach(([name, metric], i) => {
    const card = chartCard(data, name, metric);
    card.hidden = i >= FIRST_CHARTS;
    cards.push({ card, name, extra: i >= FIRST_CHARTS ? extra : null });
    grid.append(card);
  });
  const block = el("div", { class: "row" }, el("h3", {}, QUESTIONS[row], el("span", { class: "soft small" }, count(members.length, "metric"))), grid);
  if (members.length > FIRST_CHARTS) {
    const more = members.length - FIRST_CHARTS;
    const button = el("button", { type: "button", "aria-expanded": "false", style: { marginTop: ".7rem" }, onclick: () => {
      extra.open = !extra.open;
      [...grid.children].slice(FIRST_CHARTS).forEach((card) => { card.hidden = !extra.open; });
      button.setAttribute("aria-expanded", String(extra.open));
      button.textContent = extra.open ? "Show fewer" : `Show ${more} more`;
    } }, `Show ${more} more`);
    block.append(button);
  }
  return block;
}

function curveNotes(data) {
  const thinned = data.runs.some((run) => Object.values(run.curves).some((curve) => curve.of > curve.y.length));
  const left = data.runs.reduce((sum, run) => sum + run.left_out, 0);
  const gaps = data.runs.some((run) => Object.values(run.curves).some((curve) => curve.y.includes(null)));
  const notes = [];
  if (thinned) notes.push("Long curves are thinned out: of each stretch of steps the lowest and the highest value are drawn, so that no peak is lost.");
  if (left) notes.push(`${count(left, "metric")} that would not fit ${left === 1 ? "is" : "are"} left out; metrics.jsonl has all.`);
  if (gaps) notes.push("Where a curve has a gap the value was not a finite number.");
  return notes.join(" ");
}

// Data of one metric for uPlot: steps, a column per run, then the smoothed columns.
function chartData(data, name) {
  const tables = data.runs.map((run) => {
    const curve = run.curves[name];
    return curve ? [sums(curve.x), curve.y] : [[], []];
  });
  const joined = uPlot.join(tables);
  const smoothed = curveState.smoothing ? joined.slice(1).map((ys) => smooth(ys, curveState.smoothing)) : [];
  return [...joined, ...smoothed];
}

function chartCard(data, name, metric) {
  const aim = { higher: "↑ is better", lower: "↓ is better" }[metric.better] || "";
  const others = [...new Set(data.runs.map((run) => run.curves[name]?.name).filter(Boolean))].join(", ");
  const title = [metric.meaning, others && `In verl: ${others}.`, metric.unit && `Unit: ${metric.unit}.`, metric.better && `${metric.better} is better.`].filter(Boolean).join(" ");
  const plot = el("div", { class: "plot" });
  const readout = el("div", { class: "readout" });
  const card = el("article", { class: "chart", tabindex: "0", title, "aria-label": chartWords(data, name, metric) },
    el("h4", { class: "mono" }, name), metric.meaning && el("p", { class: "meaning" }, metric.meaning.replace(/`/g, "")), readout, plot);
  const chart = { card, name, plot, readout, data, aim, unit: metric.unit, u: null };
  chart.build = () => buildChart(chart);
  card.addEventListener("keydown", (event) => chartKey(event, chart));
  new IntersectionObserver((entries, observer) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    charts.add(chart);
    chart.build();
    new ResizeObserver(() => chart.u && plot.clientWidth && chart.u.setSize({ width: plot.clientWidth, height: 170 })).observe(plot);
  }, { rootMargin: "300px" }).observe(card);
  repaints.push(() => chart.u && chart.build());
  return card;
}

function chartWords(data, name, metric) {
  const parts = data.runs.filter((run) => run.curves[name]).map((run) => {
    const ys = run.curves[name].y.filter((y) => y !== null);
    return `${data.runs.length > 1 ? run.name + ": " : ""}${count(ys.length, "value")}, first ${say(ys[0])}, last ${say(ys.at(-1))}`;
  });
  return `${name}. ${metric.meaning} ${parts.join("; ")}. Left and right arrow keys read values.`;
}

function buildChart(chart) {
  const { data, plot, name } = chart;
  const columns = chartData(data, name);
  if (chart.u) chart.u.destroy();
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui", gap: 3 };
  const runs = data.runs.length;
  const series = columns.slice(1).map((_, i) => {
    const faint = curveState.smoothing > 0 && i < runs;
    return {
      stroke: colour(i % runs) + (faint ? "55" : ""), width: faint ? 1 : 1.8, dash: runs > 1 && !faint ? DASHES[i % runs % DASHES.length] : [],
      points: { show: !faint && columns[0].length <= 60, size: 5, fill: colour(i % runs) }, spanGaps: false,
    };
  });
  chart.u = new uPlot({
    width: Math.max(plot.clientWidth, 120), height: 170, legend: { show: false }, padding: [8, 10, 0, 0],
    scales: { x: { time: false, range: (u, low, high) => [low, high] }, y: { range: (u, low, high) => spread(low, high) } },
    series: [{}, ...series],
    axes: [{ ...axis, size: 26, gap: 7, incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1e3, 2e3, 2.5e3, 5e3, 1e4, 2e4, 2.5e4, 5e4, 1e5, 1e6, 1e7] },
      { ...axis, size: 52, values: (u, ticks) => ticks.map((tick) => say(Number(tick.toPrecision(10)))) }],
    cursor: { y: false, sync: { key: "steps", scales: ["x", null] }, points: { size: 7 }, bind: { dblclick: () => allSteps } },
    hooks: { setCursor: [() => readCursor(chart)], setScale: [(u, key) => { if (key === "x") showRange(u.scales.x); }] },
  }, columns, plot);
  chart.u.setScale("x", { ...curveState.shown }); // otherwise uPlot would use the range of steps of this curve
  chart.u.root.setAttribute("aria-hidden", "true");
  readCursor(chart);
}

function allSteps() {
  showRange(curveState.all);
}

// uPlot's sync skips a chart that is drawn while a mouse button is pressed, so the cursor is set here.
function showRange({ min, max }) {
  if (min === curveState.shown.min && max === curveState.shown.max) return;
  curveState.shown = { min, max };
  charts.forEach((chart) => chart.u.setScale("x", { min, max }));
}

// Add a margin above and below the curve, also for a constant curve.
function spread(low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// Show the values at the cursor, or the last values without a cursor.
function readCursor(chart) {
  const { u, data, readout } = chart;
  if (!u) return;
  const at = u.cursor.idx === null || u.cursor.idx === undefined ? u.data[0].length - 1 : u.cursor.idx;
  const runs = data.runs.length;
  const values = data.runs.map((_, i) => {
    const ys = u.data[u.data.length > runs + 1 ? i + 1 + runs : i + 1];
    let j = at;
    while (j > 0 && (ys[j] === undefined)) j -= 1;
    return ys[j] === undefined ? null : el("span", {}, runs > 1 && dot(i), el("strong", {}, say(ys[j])));
  });
  readout.replaceChildren(...values.filter(Boolean), el("span", { class: "soft" }, [chart.unit, `step ${say(u.data[0][at])}`].filter(Boolean).join(" · ")), el("span", { class: "aim" }, chart.aim));
}

function chartKey(event, chart) {
  const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (move === undefined || !chart.u || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const xs = chart.u.data[0];
  const now = chart.u.cursor.idx ?? (move > 0 ? -1 : xs.length);
  const x = xs[Math.min(xs.length - 1, Math.max(0, now + move))];
  charts.forEach(({ u }) => u && u.setCursor({ left: u.valToPos(x, "x"), top: 20 }));
}
