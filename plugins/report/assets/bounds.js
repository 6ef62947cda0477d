"use strict";
// Bars of the mean seconds of each phase, with the part that the machine would need at least (metrics bound/<phase>_s).

// Mean of a curve without its first step, which allocates memory.
function meanOf(curve) {
  const values = curve.y.slice(1).filter((value) => value !== null);
  return values.length ? values.reduce((a, b) => a + b) / values.length : null;
}

function boundsOf(run) {
  const byName = Object.fromEntries(Object.entries(run.curves).map(([name, curve]) => [curve.name || name, curve]));
  const phases = Object.keys(byName).map((name) => /^bound\/(.+)_s$/.exec(name)).filter((match) => match && byName[`timing_s/${match[1]}`]);
  return phases.map((match) => ({ phase: match[1], bound: meanOf(byName[match[0]]), took: meanOf(byName[`timing_s/${match[1]}`]) }))
    .filter((row) => row.bound !== null && row.took).sort((a, b) => b.took - a.took);
}

function boundBar(row, longest) {
  const share = Math.min(row.bound / row.took, 1);
  const inner = el("div", { style: { width: `${100 * share}%`, minWidth: "2px", height: "100%" } });
  const outer = el("div", { style: { width: `${100 * row.took / longest}%`, height: "1rem" } }, inner);
  repainted(() => { inner.style.background = colour(0); outer.style.background = `${colour(0)}55`; });
  return el("div", { role: "img", "aria-label": `${row.phase}: ${seconds(row.took)}, allowed ${seconds(row.bound)}`, style: { minWidth: "12rem" } }, outer);
}

function boundsPart(data) {
  const runs = data.runs.map((run) => [run, boundsOf(run)]).filter(([, rows]) => rows.length);
  if (!runs.length) return null;
  const longest = Math.max(...runs.flatMap(([, rows]) => rows.map((row) => row.took)));
  const tables = runs.map(([run, rows]) => [data.runs.length > 1 && el("h3", {}, run.name),
    table(["phase", "mean of a step", "allowed", "share", "time, and in full colour what the machine would need at least"], rows.map((row) => [el("code", {}, row.phase), seconds(row.took), seconds(row.bound), `${Math.round(100 * row.bound / row.took)} %`, boundBar(row, longest)]), [1, 2, 3])]);
  return el("section", { id: "limits", "aria-labelledby": "limits-head" }, el("h2", { id: "limits-head" }, "Phases, and what the machine allows"), tables.flat());
}
