"use strict";
// The page: outcome, changed options, and keyboard shortcuts.

const KEYS = [
  ["j / k", "next, previous step of the rollouts"], ["n / p", "next, previous prompt"],
  ["1 2 3", "colour tokens by log-probability, advantage, mismatch"], ["f", "show all rewards again"],
  ["← →", "in a focused chart, timeline or response: read values, move, walk through tokens"], ["+ − 0", "in the focused timeline: zoom in, out, show all"],
  ["d", "dark or light"], ["?", "this list"],
];

function outcomePart(data) {
  const part = el("section", { id: "outcome", "aria-label": "Outcome", style: { marginTop: ".6rem" } });
  const several = data.runs.length > 1;
  part.append(el("h1", {}, several ? `${data.runs.length} runs beside each other` : data.runs[0].name));
  data.runs.forEach((run, i) => {
    const mark = el("span", { style: { display: "contents" } });
    if (several) repainted(() => mark.replaceChildren(dot(i)));
    const card = el("div", { class: "card" },
      el("div", { class: "run-head" }, mark, several && el("strong", {}, run.name), el("span", { class: `chip ${run.status.split(" ")[0]}` }, run.status), run.recipe && el("span", { class: "soft" }, run.recipe)),
      el("p", { class: "outcome" }, run.outcome),
      run.error && el("p", { class: "error mono", role: "alert" }, run.error),
      el("dl", { class: "facts" }, run.facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
    run.alarms.forEach((alarm) => card.append(alarmBox(alarm)));
    if (run.jobs.length) card.append(el("details", {}, el("summary", {}, `${count(run.jobs.length, "process was", "processes were")} lost, replaced or restarted`), table(["when", "what", "process", "why"], run.jobs.map((job) => [seconds(job.t), job.kind, job.process, job.text]))));
    part.append(card);
  });
  return part;
}

function alarmBox(alarm) {
  return el("div", { class: "alarm", role: "note" }, el("strong", {}, `⚠ ${String(alarm.alarm).replace(/_/g, " ")}, at step ${alarm.step}`), el("p", {}, String(alarm.text)), alarm.advice && el("p", {}, el("strong", {}, "What to try: "), String(alarm.advice)));
}

function changedPart(data) {
  const part = el("section", { id: "changed", "aria-labelledby": "changed-head" });
  if (data.differs) {
    const { rows, of } = data.differs;
    part.append(el("h2", { id: "changed-head" }, "Options that differ between the runs"),
      rows.length ? table(["option", ...data.runs.map((run) => run.name)], rows.map(([name, ...values]) => [el("code", {}, name), ...values.map((value) => value ?? "—")])) : el("p", { class: "soft" }, "None, except the run folder."));
    if (of > rows.length) part.append(el("p", { class: "soft small" }, `${of - rows.length} more options differ; see config.yaml of each run.`));
    return part;
  }
  const { changed } = data.runs[0];
  part.append(el("h2", { id: "changed-head" }, "Options changed from the defaults"));
  if (!changed) part.append(el("p", { class: "soft" }, "plan.json of the run does not list them; config.yaml has all options."));
  else if (!changed.length) part.append(el("p", { class: "soft" }, "None: all options have their defaults."));
  else part.append(table(["option", "value"], changed.map(([name, value]) => [el("code", {}, name), el("code", {}, value)])));
  return part;
}

function fillNav(data, parts) {
  const names = { outcome: "Outcome", changed: data.differs ? "Differences" : "Options", curves: "Curves", timeline: "Timeline", limits: "Limits", memory: "Memory", rollouts: "Rollouts" };
  const toggle = el("button", { type: "button", id: "theme", title: "Key d", onclick: () => setTheme(theme() === "dark" ? "light" : "dark") });
  repainted(() => { toggle.textContent = theme() === "dark" ? "Light" : "Dark"; toggle.setAttribute("aria-label", `Switch to the ${theme() === "dark" ? "light" : "dark"} colours`); });
  document.getElementById("nav").append(...parts.map((part) => el("a", { href: `#${part.id}` }, names[part.id])), el("span", { class: "gap" }), toggle, el("button", { type: "button", title: "Key ?", onclick: openHelp }, "Keys"));
}

function openHelp() {
  const help = document.getElementById("help");
  help.replaceChildren(el("h2", {}, "Keys"), el("dl", {}, KEYS.flatMap(([keys, what]) => [el("dt", {}, keys.split(" ").map((key) => /[/]/.test(key) ? " " : el("kbd", {}, key))), el("dd", {}, what)])), el("button", { type: "button", autofocus: true, onclick: () => help.close() }, "Close"));
  help.showModal();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "range") return;
  const view = rolloutView;
  const of = {
    d: () => setTheme(theme() === "dark" ? "light" : "dark"), "?": openHelp,
    ...(view && {
      j: () => goTo(view, { step: view.step + 1 }), k: () => goTo(view, { step: view.step - 1 }),
      n: () => goTo(view, { group: view.group + 1 }), p: () => goTo(view, { group: view.group - 1 }),
      f: () => view.bin !== null && goTo(view, { bin: view.bin }),
      1: () => view.colours[0].click(), 2: () => view.colours[1].click(), 3: () => view.colours[2].click(),
    }),
  }[event.key];
  if (of && !document.getElementById("help").open) of();
}

async function begin() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  const main = document.getElementById("main");
  try {
    const data = await unpack();
    document.title = `${data.runs.map((run) => run.name).join(", ")} · run report`;
    const parts = [outcomePart, changedPart, curvesPart, timelinePart, boundsPart, memoryPart, rolloutsPart].map((make) => make(data)).filter(Boolean);
    main.replaceChildren(...parts, el("footer", {}, `Written ${data.made}. This file holds all that it shows and asks no network for anything.`));
    fillNav(data, parts);
    document.addEventListener("keydown", onKey);
  } catch (error) {
    const old = typeof DecompressionStream === "undefined" ? " This browser is too old for it: it has no DecompressionStream." : "";
    main.replaceChildren(el("p", { class: "error", role: "alert" }, `The report cannot be shown: ${error}.${old}`));
    throw error;
  }
}

begin();
