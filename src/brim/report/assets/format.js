// Numbers as people read them. Every text reaches the page through textContent, so it is never read as markup.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function threeDigits(value) {
  return value === 0 ? "0" : String(Number(value.toPrecision(3)));
}

function formatBytes(count) {
  let size = count;
  let unit = 0;
  while (Math.abs(size) >= 1000 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(size) : threeDigits(size)} ${UNITS[unit]}`;
}

const GROUPED = new Intl.NumberFormat("en");

function formatCount(count) {
  return Number.isInteger(count) ? GROUPED.format(count) : threeDigits(count);
}

function several(count, name) {
  return `${formatCount(count)} ${name}${count === 1 ? "" : "s"}`;
}

function formatSeconds(seconds) {
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1e-6) return `${threeDigits(seconds * 1e9)} ns`;
  if (size < 1e-3) return `${threeDigits(seconds * 1e6)} µs`;
  if (size < 1) return `${threeDigits(seconds * 1e3)} ms`;
  return `${size < 1000 ? threeDigits(seconds) : formatCount(Math.round(seconds))} s`;
}

function formatShare(share) {
  return `${(share * 100).toFixed(1)} %`;
}

const FRAME = /^(.+ at )\S*?((?:[^/\s]+\/)?[^/\s]+:\d+)$/;

// "optimizer_state" -> "optimizer state"; of a stack frame, the function and the end of the path
function words(name) {
  if (/^[a-z]+(_[a-z]+)+$/.test(name)) return name.replaceAll("_", " ");
  return name.replace(FRAME, "$1$2");
}

// Round positions on an axis: about `wanted` multiples of 1, 2 or 5 times a power of ten of `unit`.
function ticks(low, high, wanted, unit) {
  const rough = (high - low) / unit / Math.max(wanted, 1);
  if (!(rough > 0)) return { at: [low], step: 1 };
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const at = [];
  for (let k = Math.ceil(low / unit / step - 1e-9); k * step * unit <= high * (1 + 1e-12); k += 1)
    at.push(k * step * unit + 0); // no -0
  return { at, step };
}

function byteTicks(most, wanted) {
  let unit = 0;
  while (most / 1024 ** unit >= 1000 && unit < UNITS.length - 1) unit += 1;
  const factor = 1024 ** unit;
  const { at, step } = ticks(0, most, wanted, factor);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return at.map((value) => ({ value, text: `${(value / factor).toFixed(digits)} ${UNITS[unit]}` }));
}

function timeTicks(low, high, wanted) {
  const [unit, name] = [
    [1e9, "s"],
    [1e6, "ms"],
    [1e3, "µs"],
  ].find(([size]) => high >= 2 * size) || [1, "ns"];
  const { at, step } = ticks(low, high, wanted, unit);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const text = (value) =>
    (value / unit).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return at.map((value) => ({ value, text: `${text(value)} ${name}` }));
}

function eventTicks(low, high, wanted) {
  const { at } = ticks(low, high, wanted, 1);
  return at.filter(Number.isInteger).map((value) => ({ value, text: formatCount(value) }));
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}
