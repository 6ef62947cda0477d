"use strict";
// Responses of the policy, by step and by reward. Responses to a prompt are side by side, each token with its numbers.

const SCALES = {
  logprob: { label: "log-probability", bound: () => 5, words: ["certain: 0", "−5 and below: a surprise"] },
  advantage: { label: "advantage", bound: (most) => most, words: ["learnt away from", "reinforced"] },
  mismatch: { label: "mismatch", bound: (most) => most, words: ["the trainer finds it less likely than the engine did", "more likely"] },
};

function rolloutsPart(data) {
  const part = el("section", { id: "rollouts", "aria-labelledby": "rollouts-head" }, el("h2", { id: "rollouts-head" }, "Rollouts"));
  const runs = data.runs.filter((run) => run.rollouts && run.rollouts.steps.length);
  if (!runs.length) {
    const empty = data.runs.some((run) => run.rollouts) ? "The files of the rollouts cannot be read." : "There are no rollouts: a supervised recipe writes none, and one that samples writes them after its first step.";
    part.append(el("p", { class: "soft" }, empty));
    return part;
  }
  const view = { runs, run: runs[0], step: 0, group: 0, bin: null, colour: "logprob" };
  view.body = el("div", { class: "responses-box" });
  view.bars = el("div", { class: "histogram", role: "group", "aria-label": "Rewards of the step; press one to see only those" });
  view.binWords = el("p", { class: "soft small", "aria-live": "polite" });
  view.legend = el("div", { class: "legend small" });
  view.info = el("div", { class: "token-info small", "aria-live": "polite" });
  part.append(el("div", { class: "card" }, rolloutTools(view), el("p", { class: "small soft", style: { margin: "0" } }, "Rewards of the step: how many responses had which. Press a bar to see only those."), view.bars, view.binWords, colourTools(view), view.legend), el("div", {}, view.body, view.info));
  part.append(view.notes = el("p", { class: "soft small" }));
  view.body.addEventListener("mouseover", (event) => event.target.classList.contains("tok") && mark(view, event.target));
  rolloutView = view;
  goTo(view, { step: view.run.rollouts.steps.length - 1 });
  repaints.push(() => drawRollouts(view));
  return part;
}

let rolloutView = null;

function rolloutTools(view) {
  view.slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "Step", oninput: () => goTo(view, { step: Number(view.slider.value) }) });
  view.stepName = el("output", { class: "mono" });
  view.chooser = el("select", { "aria-label": "Prompt", onchange: () => goTo(view, { group: Number(view.chooser.value) }) });
  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  const run = view.runs.length > 1 && el("label", {}, "Run", el("select", { onchange: (event) => {
    view.run = view.runs[Number(event.target.value)];
    goTo(view, { step: view.run.rollouts.steps.length - 1 });
  } }, view.runs.map((each, i) => el("option", { value: i }, each.name))));
  return el("div", { class: "tools" }, run,
    el("label", {}, "Step", button("◀", "Previous step (k)", () => goTo(view, { step: view.step - 1 })), view.slider, button("▶", "Next step (j)", () => goTo(view, { step: view.step + 1 })), view.stepName),
    el("label", {}, "Prompt", button("◀", "Previous prompt (p)", () => goTo(view, { group: view.group - 1 })), view.chooser, button("▶", "Next prompt (n)", () => goTo(view, { group: view.group + 1 }))));
}

function colourTools(view) {
  view.colours = Object.entries(SCALES).map(([name, scale], i) => el("button", { type: "button", role: "radio", "data-colour": name, title: `Key ${i + 1}`, onclick: () => { view.colour = name; drawRollouts(view); } }, scale.label));
  return el("div", { class: "tools", role: "radiogroup", "aria-label": "Colour of the tokens" }, el("span", {}, "Tokens by"), view.colours);
}

// Select another step, prompt or reward, within the existing ones.
function goTo(view, { step = view.step, group, bin }) {
  const { steps } = view.run.rollouts;
  const next = Math.max(0, Math.min(steps.length - 1, step));
  if (next !== view.step || !view.data || view.data !== steps[next]) {
    view.bin = null;
    group ??= mostSpread(steps[next].groups);
  }
  view.step = next;
  view.data = steps[next];
  if (bin !== undefined) { view.bin = view.bin === bin ? null : bin; view.group = 0; }
  view.groups = view.data.groups.filter((each) => view.bin === null || each.responses.some((response) => response.bin === view.bin));
  if (group !== undefined) view.group = group;
  view.group = Math.max(0, Math.min(view.groups.length - 1, view.group));
  drawRollouts(view);
}

function drawRollouts(view) {
  const { data, run } = view;
  const { steps } = run.rollouts;
  view.slider.max = steps.length - 1;
  view.slider.value = view.step;
  view.slider.setAttribute("aria-valuetext", `step ${data.step}`);
  view.stepName.textContent = `${data.step}`;
  view.chooser.replaceChildren(...view.groups.map((group, i) => el("option", { value: i, selected: i === view.group }, `${groupMean(group)} · ${(group.prompt ?? `prompt ${group.id}`).replace(/\s+/g, " ").slice(0, 60)}`)));
  drawHistogram(view);
  const has = (name) => data.groups.some((group) => group.responses.some((response) => response[name] !== undefined));
  if (!has(view.colour)) view.colour = Object.keys(SCALES).find(has) || "logprob";
  for (const button of view.colours) {
    const name = button.dataset.colour;
    button.disabled = !has(name);
    button.setAttribute("aria-checked", String(name === view.colour));
  }
  view.bound = SCALES[view.colour].bound(largest(data, view.colour));
  drawLegend(view);
  view.body.replaceChildren(...(view.groups.length ? drawGroup(view, view.groups[view.group]) : [el("p", { class: "soft" }, "None of the responses in this file had that reward.")]));
  view.info.classList.remove("filled");
  view.info.textContent = "Point at a token, or focus a response and walk with the arrow keys, to see its numbers.";
  view.notes.textContent = rolloutNotes(view);
}

// Start with the group whose rewards differ most.
function mostSpread(groups) {
  const spread = groups.map((group) => {
    const rewards = group.responses.map((response) => response.reward ?? 0);
    const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    return rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length;
  });
  return Math.max(0, spread.indexOf(Math.max(...spread)));
}

function groupMean(group) {
  const rewards = group.responses.map((response) => response.reward).filter((reward) => typeof reward === "number");
  return rewards.length ? `mean ${say(Number((rewards.reduce((a, b) => a + b, 0) / rewards.length).toPrecision(3)))}` : "no reward";
}

function largest(data, name) {
  let most = 0;
  for (const group of data.groups) for (const response of group.responses) for (const v of [response[name] ?? 0].flat()) most = Math.max(most, Math.abs(v ?? 0));
  return most;
}

function drawHistogram(view) {
  const { data } = view;
  const most = Math.max(1, ...data.bins.map((bin) => bin[2]));
  const here = data.bins.map((_, i) => data.groups.reduce((sum, group) => sum + group.responses.filter((response) => response.bin === i).length, 0));
  const focused = [...view.bars.children].indexOf(document.activeElement);
  view.bars.replaceChildren(...data.bins.map(([low, high, n], i) => {
    const name = low === high ? say(low) : `${say(low)} to ${say(high)}`;
    const label = `Reward ${name}: ${count(n, "response")}, ${here[i]} in this file`;
    return el("button", { type: "button", "aria-pressed": String(view.bin === i), "aria-label": label, title: label, onclick: () => goTo(view, { bin: i }) },
      el("i", { style: { height: `${Math.max(2, (n / most) * 100)}%` } }, el("b", { style: { height: `${n ? (here[i] / n) * 100 : 0}%` } })), el("em", {}, say(low === high ? low : Number(low.toPrecision(2)))));
  }));
  if (focused >= 0 && view.bars.children[focused]) view.bars.children[focused].focus();
  const kept = here.reduce((a, b) => a + b, 0);
  const shown = view.bin === null ? "" : ` Shown: those with reward ${data.bins[view.bin][0] === data.bins[view.bin][1] ? say(data.bins[view.bin][0]) : `${say(data.bins[view.bin][0])} to ${say(data.bins[view.bin][1])}`} (f shows all).`;
  view.binWords.textContent = `${count(data.of, "response")} to ${count(data.of_groups, "prompt")}; in the stronger colour the ${kept.toLocaleString("en")} that are in this file.${shown}`;
}

function drawLegend(view) {
  const scale = SCALES[view.colour], { bound } = view;
  const steps = view.colour === "logprob" ? [0, -1.25, -2.5, -3.75, -5] : [-1, -0.5, 0, 0.5, 1].map((part) => part * bound);
  const bar = el("span", { class: "scale", "aria-hidden": "true", style: { background: `linear-gradient(90deg, ${steps.map((v) => shade(view, v) || "transparent").join(", ")})` } });
  const words = view.colour === "logprob" ? scale.words : [`${say(-bound)}: ${scale.words[0]}`, `${say(bound)}: ${scale.words[1]}`];
  view.legend.replaceChildren(el("span", {}, el("span", {}, words[0]), bar, words[1]), el("span", {}, el("span", { class: "scale grey", "aria-hidden": "true" }), "grey text: not the policy's, not learnt from"));
}

// Orange for improbable tokens and values below 0, blue for values above 0, no color for 0.
function shade(view, value) {
  if (value === null || value === undefined || !view.bound) return "";
  const strength = Math.min(1, Math.abs(value) / view.bound) * (theme() === "dark" ? 0.72 : 0.6);
  if (strength < 0.004) return "";
  const rgb = view.colour !== "logprob" && value > 0 ? (theme() === "dark" ? "60, 150, 230" : "0, 114, 178") : "222, 104, 0";
  return `rgba(${rgb}, ${strength.toFixed(3)})`;
}

function drawGroup(view, group) {
  const first = group.responses[0];
  const common = first.runs[0] && first.runs[0][0] === 0 ? first.t.slice(0, first.runs[0][1]) : [];
  const shared = common.length > 0 && group.responses.every((a) => a.runs[0] && a.runs[0][0] === 0 && a.runs[0][1] === common.length && common.every((t, i) => t === a.t[i]));
  const shown = group.responses.filter((response) => view.bin === null || response.bin === view.bin);
  const facts = [`prompt ${group.id}`, group.datasource && `from ${group.datasource}`, count(group.of, "response"), group.of > group.responses.length && `${group.responses.length} of them in this file`, shown.length < group.responses.length && `${shown.length} with that reward`].filter(Boolean);
  const head = el("div", { class: "card", style: { margin: ".8rem 0" } }, el("div", { class: "small soft" }, facts.join(" · ")));
  if (shared) head.append(el("div", { class: "bubble other" }, el("span", { class: "who" }, "prompt"), tokens(view, common, null, 0)));
  else if (!view.run.rollouts.has_text && group.prompt) head.append(el("div", { class: "bubble other" }, el("span", { class: "who" }, "prompt"), visible(group.prompt)));
  if (group.label !== undefined && group.label !== "None") head.append(el("div", { class: "small" }, "wanted: ", el("code", {}, visible(group.label))));
  return [head, el("div", { class: "responses" }, shown.map((response) => drawResponse(view, response, shared)))];
}

function drawResponse(view, response, shared) {
  const name = `response ${response.sample_id ?? ""}${response.branch ? ` branch ${response.branch}` : ""}`;
  const reward = response.reward === undefined ? "no reward" : `reward ${say(response.reward)}`;
  const about = [response.score !== undefined && response.score !== response.reward && `score ${say(response.score)}`, response.shaped_reward !== undefined && response.shaped_reward !== response.reward && `shaped ${say(response.shaped_reward)}`, response.status, count(response.policy, "token"), response.error].filter(Boolean);
  const card = el("article", { class: "response", tabindex: "0", "aria-label": `${name}, ${reward}, ${about.join(", ")}. Arrow keys walk through its tokens.` },
    el("header", {}, el("strong", {}, reward), el("span", { class: "soft" }, [name, ...about].join(" · "))));
  card.addEventListener("keydown", (event) => walk(view, event, card));
  let at = 0, own = 0;
  response.runs.forEach(([whose, n], i) => {
    if (whose < 0) {
      card.append(el("div", { class: "left-out" }, `… ${count(n, "token")} left out …`));
      return;
    }
    const part = response.t.slice(at, at + n);
    if (whose === 1) card.append(el("div", { class: "bubble own" }, el("span", { class: "visually-hidden" }, "policy: "), tokens(view, part, response, own)));
    else if (i > 0 || !shared) card.append(el("div", { class: "bubble other" }, el("span", { class: "who" }, i === 0 ? "prompt" : "the world"), tokens(view, part, null, 0)));
    at += n;
    own += whose === 1 ? n : 0;
  });
  return card;
}

// Show invisible characters as symbols.
function visible(text) {
  return text.replace(/\n/g, "↵\n").replace(/[\u0000-\u0009\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0))) || "▫";
}

function numberOf(response, name, i) {
  const values = response[name];
  return Array.isArray(values) ? values[i] : values;
}

function tokens(view, places, response, first) {
  return places.map((place, i) => {
    const [id, text] = view.run.rollouts.vocabulary[place];
    const token = el("span", { class: "tok" }, visible(text));
    if (response) {
      token.style.backgroundColor = shade(view, numberOf(response, view.colour, first + i));
      token.words = () => [`“${text}”`, `id ${id}`, ...["logprob", "advantage", "mismatch", "value", "reference_logprob"].filter((name) => response[name] !== undefined).map((name) => numberWords(name, numberOf(response, name, first + i)))].join(" · ");
    } else token.words = () => `“${text}” · id ${id} · not the policy's token: not learnt from`;
    return token;
  });
}

function numberWords(name, value) {
  if (name !== "logprob") return `${name.replace("_", " ")} ${say(value)}`;
  return `log-probability ${say(value)}${typeof value === "number" ? ` (${say(Number((Math.exp(value) * 100).toPrecision(3)))} %)` : ""}`;
}

function mark(view, token) {
  view.body.querySelectorAll(".tok.at").forEach((other) => other.classList.remove("at"));
  token.classList.add("at");
  view.info.classList.add("filled");
  view.info.textContent = token.words();
}

function walk(view, event, card) {
  const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  const all = [...card.querySelectorAll(".tok")];
  if (move === undefined || !all.length || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const now = all.findIndex((token) => token.classList.contains("at"));
  const next = all[Math.max(0, Math.min(all.length - 1, now < 0 ? (move > 0 ? 0 : all.length - 1) : now + move))];
  mark(view, next);
  next.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function rolloutNotes(view) {
  const { rollouts } = view.run, { data } = view;
  const notes = [];
  if (rollouts.steps.length < rollouts.of_steps) notes.push(`${rollouts.steps.length} of ${rollouts.of_steps.toLocaleString("en")} steps are in this file, evenly spaced.`);
  if (rollouts.unread) notes.push(`${count(rollouts.unread, "file")} of rollouts could not be read.`);
  if (data.groups.length < data.of_groups) notes.push(`Of this step, ${data.groups.length} of ${count(data.of_groups, "prompt")} are shown with their responses: the best, the worst, the one with the largest spread of rewards, and others in between.`);
  if (data.cut) notes.push(`${count(data.cut, "long response")} of this step ${data.cut === 1 ? "is" : "are"} cut in the middle.`);
  if (!rollouts.has_text) notes.push("There is no tokenizer in the run's folder, so tokens are shown as their ids.");
  if (notes.length) notes.push("The folder rollouts/ of the run has all of them.");
  return notes.join(" ");
}
