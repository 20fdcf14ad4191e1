// Colours (Okabe and Ito: told apart by colour-blind people) and, for those who see none, a pattern for each.

const COLOURS = {
  parameter: "#0072B2",
  buffer: "#7f7f7f",
  gradient: "#E69F00",
  optimizer_state: "#009E73",
  kv_cache: "#D55E00",
  input: "#F0E442",
  activation: "#56B4E9",
  workspace: "#8c6d4f",
  temporary: "#CC79A7",
  optimizer_temporary: "#882255",
  others: "#a6a6a6",
  "not known": "#9aa3ad",
};
const CYCLE = [
  "#0072B2",
  "#E69F00",
  "#009E73",
  "#56B4E9",
  "#CC79A7",
  "#D55E00",
  "#F0E442",
  "#8c6d4f",
  "#7f7f7f",
  "#a6a6a6",
];
const PATTERNS = {
  parameter: "none",
  buffer: "grid",
  gradient: "up",
  optimizer_state: "dots",
  kv_cache: "down",
  input: "level",
  activation: "upright",
  workspace: "cross",
  temporary: "wide",
  optimizer_temporary: "down",
  others: "grid",
  "not known": "level",
};
const PATTERN_CYCLE = ["none", "up", "dots", "upright", "wide", "down", "level", "cross", "grid", "none"];

function colourOf(panel, group) {
  return (panel.grouped_by === "category" && COLOURS[panel.groups[group]]) || CYCLE[group % CYCLE.length];
}

function patternOf(panel, group) {
  return (
    (panel.grouped_by === "category" && PATTERNS[panel.groups[group]]) || PATTERN_CYCLE[group % PATTERN_CYCLE.length]
  );
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const STROKES = {
  up: [[0, 8, 8, 0]],
  down: [[0, 0, 8, 8]],
  level: [[0, 4, 8, 4]],
  upright: [[4, 0, 4, 8]],
  cross: [
    [0, 8, 8, 0],
    [0, 0, 8, 8],
  ],
  grid: [
    [0, 4, 8, 4],
    [4, 0, 4, 8],
  ],
  wide: [[0, 8, 8, 0]],
  dots: [],
};
const fillCache = new Map();

// An 8 x 8 tile of the colour with its strokes, as a pattern of `context`.
function fillOf(context, colour, pattern) {
  if (pattern === "none") return colour;
  const size = pattern === "wide" ? 16 : 8;
  const key = `${colour} ${pattern}`;
  if (!fillCache.has(key)) {
    const tile = element("canvas", { width: size * 2, height: size * 2 });
    const draw = tile.getContext("2d");
    draw.scale((size / 8) * 2, (size / 8) * 2);
    draw.fillStyle = colour;
    draw.fillRect(0, 0, 8, 8);
    draw.strokeStyle = draw.fillStyle = "rgba(0, 0, 0, 0.32)";
    draw.lineWidth = pattern === "wide" ? 0.5 : 1;
    for (const [x0, y0, x1, y1] of STROKES[pattern]) {
      for (const shift of x0 === x1 || y0 === y1 ? [0] : [-8, 0, 8]) {
        draw.beginPath();
        draw.moveTo(x0 + shift, y0);
        draw.lineTo(x1 + shift, y1);
        draw.stroke();
      }
    }
    if (pattern === "dots")
      for (const [x, y] of [
        [2, 2],
        [6, 6],
      ])
        draw.fillRect(x - 0.75, y - 0.75, 1.5, 1.5);
    const made = context.createPattern(tile, "repeat");
    made.setTransform(new DOMMatrix().scale(0.5));
    fillCache.set(key, made);
  }
  return fillCache.get(key);
}

// A canvas as wide as its parent, sharp on any screen; gives its context in CSS pixels.
function prepare(canvas, height) {
  const width = Math.max(canvas.parentElement.clientWidth, 240);
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `12px ${css("font")}`;
  context.textBaseline = "middle";
  return { context, width };
}

function swatch(panel, group) {
  const canvas = element("canvas", { width: 32, height: 32, class: "swatch", "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  context.fillStyle = group < 0 ? "transparent" : fillOf(context, colourOf(panel, group), patternOf(panel, group));
  context.fillRect(0, 0, 16, 16);
  return canvas;
}

// A box beside the pointer with lines of (name, value).
class Tooltip {
  constructor() {
    this.box = element("div", { class: "tooltip", role: "presentation", hidden: true });
    document.body.append(this.box);
  }

  show(event, head, rows) {
    this.box.replaceChildren(element("strong", { text: head }));
    for (const [name, value, mark] of rows) {
      this.box.append(
        element(
          "div",
          {},
          mark || element("span", { class: "swatch" }),
          element("span", { text: name }),
          element("b", { text: value }),
        ),
      );
    }
    this.box.hidden = false;
    const { clientWidth, clientHeight } = this.box;
    const left =
      event.clientX + 16 + clientWidth > window.innerWidth ? event.clientX - clientWidth - 12 : event.clientX + 16;
    this.box.style.left = `${Math.max(left, 4)}px`;
    this.box.style.top = `${Math.max(Math.min(event.clientY + 12, window.innerHeight - clientHeight - 8), 4)}px`;
  }

  hide() {
    this.box.hidden = true;
  }
}
