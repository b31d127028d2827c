// Data, elements, numbers as text, colours, the tooltip, the theme.

const DATA = JSON.parse(document.getElementById("plan-data").textContent);
const text = (number) => DATA.texts[number];

// An element with attributes and children. Children are nodes or text, never parsed as HTML.
function make(tag, attributes, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "text", "title"].includes(tag);
  const node = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return node;
}

// -- numbers

function digits(value, count) {
  const size = Math.abs(value);
  const places = size >= 100 ? 0 : size >= 10 ? Math.min(1, count - 1) : count - 1;
  return value.toFixed(places);
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value >= 1) return `${digits(value, 3)} s`;
  if (value >= 1e-3) return `${digits(value * 1e3, 3)} ms`;
  if (value >= 1e-6) return `${digits(value * 1e6, 2)} µs`;
  return value < 1e-10 ? "<0.1 ns" : `${digits(value * 1e9, 2)} ns`;
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit ? digits(value, 2) : Math.round(value)} ${units[unit]}`;
}

function scaled(value, unit) {
  const prefixes = ["", "K", "M", "G", "T", "P", "E"];
  let step = 0;
  while (Math.abs(value) >= 1000 && step < prefixes.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${digits(value, 3).replace(/\.0+$/, "")} ${prefixes[step]}${unit}`;
}

const percent = (share) => (share > 0 && share < 0.005 ? "<1%" : `${Math.round(100 * share)}%`);
const count = (number, thing) =>
  `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : thing.endsWith("ch") || thing.endsWith("sh") ? "es" : "s"}`;
const sum = (values) => values.reduce((total, value) => total + value, 0);

// -- colours

const NUM_COLOURS = 8;
const colour = (number) => `var(--c${number % NUM_COLOURS})`;
const onColour = (number) => ([0, 6].includes(number % NUM_COLOURS) ? "var(--on-dark-fill)" : "#101418"); // text upon it
const named = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const PHASE_COLOURS = {
  forward: 0,
  backward: 1,
  weights: 2,
  update: 4,
  prepare: 5,
  send: 6,
  recv: 7,
  collective: 3,
  other: 3,
};
const phaseOf = (kind, phase) => (phase in PHASE_COLOURS ? phase : kind in PHASE_COLOURS ? kind : "other");
const PART_COLOURS = {
  forward: 0,
  backward: 1,
  update: 4,
  communication: 3,
  "host memory": 5,
  "launch overhead": 6,
  bubble: 7,
};

function legend(entries) {
  return make(
    "ul",
    { class: "legend" },
    entries.map(([name, number]) =>
      make("li", {}, make("i", { style: `background:${colour(number)}` }), name),
    ),
  );
}

// A bar of parts: [[name, value, colour number], …] of a whole.
function stack(parts, whole, options = {}) {
  const shown = parts.filter(([, value]) => value > 0);
  const label = shown
    .map(([name, value]) => `${name} ${options.unit ? options.unit(value) : percent(value / whole)}`)
    .join(", ");
  return make(
    "div",
    {
      class: options.large ? "stack large" : "stack",
      role: "img",
      "aria-label": label || "nothing",
      "data-tip": label,
    },
    shown.map(([, value, number]) =>
      make("i", { style: `width:${whole ? (100 * value) / whole : 0}%;background:${colour(number)}` }),
    ),
  );
}

// -- sections

function section(id, title, lead, ...children) {
  const head = make("h2", {}, title);
  return make(
    "section",
    { id, "aria-label": title },
    head,
    lead ? make("p", { class: "lead" }, lead) : null,
    ...children,
  );
}

function facts(pairs) {
  return make(
    "dl",
    { class: "facts" },
    pairs
      .filter(([, value]) => value !== null && value !== "")
      .map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]),
  );
}

// -- the tooltip: an element with data-tip shows it while hovered or focused

const tip = document.getElementById("tip");

function showTip(words, x, y) {
  tip.textContent = words;
  tip.hidden = false;
  const room = 12;
  const left = Math.min(x + room, window.innerWidth - tip.offsetWidth - room);
  const below = y + room + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, below ? y + room : y - tip.offsetHeight - room)}px`;
}

function hideTip() {
  tip.hidden = true;
}

document.addEventListener("pointermove", (event) => {
  const target = event.target.closest ? event.target.closest("[data-tip]") : null;
  if (target && target.dataset.tip) showTip(target.dataset.tip, event.clientX, event.clientY);
  else if (!event.target.closest || !event.target.closest("canvas")) hideTip();
});
document.addEventListener("focusin", (event) => {
  const words = event.target.dataset ? event.target.dataset.tip : null;
  if (!words) {
    hideTip();
    return;
  }
  const place = event.target.getBoundingClientRect();
  showTip(words, place.left, place.bottom);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});
document.addEventListener("scroll", hideTip, { passive: true });

// -- the theme; canvases are repainted when it changes

const repaints = [];
const themeButton = document.getElementById("theme");
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : prefersDark.matches;
}

function themeChanged() {
  themeButton.textContent = isDark() ? "Light" : "Dark";
  repaints.forEach((paint) => paint());
}

themeButton.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  themeChanged();
});
prefersDark.addEventListener("change", themeChanged);

let themeOnScreen = null;
window.addEventListener("beforeprint", () => {
  themeOnScreen = document.documentElement.dataset.theme || "";
  document.documentElement.dataset.theme = "light";
  themeChanged();
});
window.addEventListener("afterprint", () => {
  if (themeOnScreen) document.documentElement.dataset.theme = themeOnScreen;
  else delete document.documentElement.dataset.theme;
  themeChanged();
});
