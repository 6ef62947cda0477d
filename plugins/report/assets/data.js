"use strict";
// Shared by all parts of the page: data, elements, numbers, colors.
// Text of runs is untrusted: it only becomes textContent, never HTML.

const QUESTIONS = { better: "Scores and losses", healthy: "Policy update: KL, entropy, gradients", says: "Rollouts: length, turns, truncation", fast: "Speed and memory" };

// Okabe and Ito's palette, which color-blind readers can distinguish; lighter colors on a dark page.
const COLOURS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#aa4499", "#b07a00", "#3a9bd1", "#5c3d99", "#444444"],
  dark: ["#56b4e9", "#e69f00", "#2bc496", "#e38fc4", "#f0e442", "#ff8552", "#b3a1f0", "#c8ccd0"],
};
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [1, 4], [12, 4], [6, 2, 2, 2]];

function theme() {
  return document.documentElement.dataset.theme;
}

function colour(i) {
  const colours = COLOURS[theme()];
  return colours[i % colours.length];
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Create an element. Properties that begin with "on" are listeners, others are attributes. Children are nodes or text.
function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false).map((child) => child instanceof Node ? child : String(child)));
  return node;
}

function dot(i) {
  return el("span", { class: "dot", style: { background: colour(i) }, "aria-hidden": "true" });
}

async function unpack() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Format a number with at most four digits.
function say(value) {
  if (value === null || value === undefined) return "no number";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return Number(value.toPrecision(3)).toExponential().replace("e+", "e").replace(/-/g, "−");
  if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", "−");
  return value.toLocaleString("en", { maximumSignificantDigits: 4 }).replace("-", "−");
}

function count(n, one, many) {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many || one + "s"}`;
}

function seconds(s) {
  if (s < 1) return `${say(Number((s * 1000).toPrecision(3)))} ms`;
  if (s < 120) return `${say(Number(s.toPrecision(3)))} s`;
  return s < 7200 ? `${say(Number((s / 60).toPrecision(3)))} min` : `${say(Number((s / 3600).toPrecision(3)))} h`;
}

// Restore values from the first one and the differences.
function sums(differences) {
  let sum = 0;
  return differences.map((d) => (sum += d));
}

function table(heads, rows, numbers = []) {
  const kind = (i) => ({ class: numbers.includes(i) ? "number" : null });
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": heads.join(", ") },
    el("table", {},
      el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", { scope: "col", ...kind(i) }, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el("td", kind(i), cell)))))));
}

// Functions that redraw when the colors change.
const repaints = [];
function repainted(draw) {
  repaints.push(draw);
  draw();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  repaints.forEach((draw) => draw());
}
