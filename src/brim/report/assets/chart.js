// Memory over time, stacked: drawing, zooming, picking a moment.

const LEFT = 74;
const RIGHT = 14;

// What all pictures of one view share: the part of the axis that is shown.
class Range {
  constructor(low, high) {
    this.full = [low, Math.max(high, low + 1)];
    [this.low, this.high] = this.full;
    this.listeners = [];
  }

  set(low, high) {
    const [least, most] = this.full;
    const width = Math.min(Math.max(high - low, 4), most - least);
    this.low = Math.min(Math.max(low, least), most - width);
    this.high = this.low + width;
    this.listeners.forEach((listener) => listener());
  }

  zoom(factor, about) {
    this.set(about - (about - this.low) * factor, about + (this.high - about) * factor);
  }

  pan(share) {
    const by = (this.high - this.low) * share;
    this.set(this.low + by, this.high + by);
  }

  toX(pixel, width) {
    return this.low + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (this.high - this.low);
  }

  toPixel(x, width) {
    return LEFT + ((x - this.low) / (this.high - this.low)) * (width - LEFT - RIGHT);
  }
}

class Chart {
  constructor(panel, range, most, tooltip, onPick) {
    Object.assign(this, { panel, range, most, tooltip, onPick });
    this.height = 300;
    this.bottom = 30;
    this.top = 26;
    this.picked = panel.peak.x;
    this.canvas = element("canvas", { class: "chart", tabindex: "0", role: "application", "aria-roledescription": "zoomable chart" });
    listenForMoves(this);
    listenForKeys(this.canvas, chartKeys(this));
  }

  y(bytes) {
    const inner = this.height - this.top - this.bottom;
    return this.top + inner * (1 - Math.min(bytes, this.scale) / this.scale);
  }

  draw() {
    const { context, width } = prepare(this.canvas, this.height);
    this.context = context;
    this.width = width;
    this.scale = this.most * 1.06;
    drawGrid(this);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - RIGHT, this.height - this.bottom);
    context.clip();
    this.seen = this.panel.visible(this.range.low, this.range.high);
    if (this.seen.last > this.seen.first) drawStack(this);
    context.restore();
    drawLines(this);
    drawMarks(this);
    this.canvas.setAttribute("aria-label", this.summary());
  }

  summary() {
    const { panel } = this;
    const at = panel.timed ? formatSeconds(panel.peak.x / 1e9) : `event ${formatCount(panel.peak.event)}`;
    return `Memory in ${panel.tier.toUpperCase()} over ${panel.timed ? "time" : "events"}: peak ${formatBytes(panel.peak.allocated_bytes)} allocated at ${at}, ` +
      `${formatBytes(panel.reserved_peak_bytes)} reserved at most. Arrows pick a moment, plus and minus zoom, Home and End go to the ends, Enter to the peak, Escape shows all.`;
  }

  // The sample under a pixel column: the largest one, as that is what is drawn there.
  sampleAt(pixel) {
    const { level, first, last } = this.seen;
    const slot = [this.range.toX(pixel - 0.5, this.width), this.range.toX(pixel + 0.5, this.width)];
    let best = Math.max(upTo(level.x, slot[0]) - 1, first, 0);
    for (let i = best; i < last && level.x[i] <= slot[1]; i += 1) if (level.total[i] > level.total[best]) best = i;
    return { level, index: best };
  }

  pickEvent(event) {
    const sample = this.panel.sample(event);
    this.picked = sample.x;
    if (sample.x < this.range.low || sample.x > this.range.high) {
      const half = (this.range.high - this.range.low) / 2;
      this.range.set(sample.x - half, sample.x + half);
    }
    this.onPick(event);
  }

  step(by) {
    const { level } = this.seen;
    const at = Math.max(upTo(level.x, this.picked) - 1, 0);
    const now = level.x[at] === this.picked || by > 0 ? at : at + 1;
    let next = Math.min(Math.max(now + by, 0), level.x.length - 1);
    if (this.last && this.last.level === level && this.last.x === this.picked) next = Math.min(Math.max(this.last.index + by, 0), level.x.length - 1);
    this.last = { level, index: next, x: level.x[next] };
    this.pickEvent(level.event[next]);
  }
}

function drawGrid(chart) {
  const { context, width, height, panel } = chart;
  const floor = height - chart.bottom;
  context.strokeStyle = css("grid");
  context.fillStyle = css("soft");
  context.lineWidth = 1;
  context.textAlign = "right";
  for (const tick of byteTicks(chart.scale, 5)) {
    const y = Math.round(chart.y(tick.value)) + 0.5;
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(width - RIGHT, y);
    context.stroke();
    context.fillText(tick.text, LEFT - 8, y);
  }
  drawAxis(chart, floor, panel.timed);
}

function drawAxis(chart, floor, timed) {
  const { context, width, range } = chart;
  const made = (timed ? timeTicks : eventTicks)(range.low, range.high, Math.max((width - LEFT) / 110, 2));
  context.fillStyle = css("soft");
  context.strokeStyle = css("soft");
  context.textAlign = "right";
  context.fillText(timed ? "time" : "event", LEFT - 24, floor + 15);
  context.textAlign = "center";
  for (const tick of made) {
    const x = range.toPixel(tick.value, width);
    if (x > width - RIGHT + 1) continue;
    context.beginPath();
    context.moveTo(Math.round(x) + 0.5, floor);
    context.lineTo(Math.round(x) + 0.5, floor + 5);
    context.stroke();
    const half = context.measureText(tick.text).width / 2;
    context.fillText(tick.text, Math.min(x, width - half - 2), floor + 15);
  }
}

// Steps: what is held after an event is held until the next one.
function trace(chart, path, column, backwards) {
  const { level, first, last } = chart.seen;
  const at = (i) => chart.range.toPixel(level.x[i], chart.width);
  const end = chart.width - RIGHT;
  if (!backwards) {
    for (let i = first; i < last; i += 1) {
      const y = chart.y(column[i]);
      path.lineTo(at(i), y);
      path.lineTo(i + 1 < level.x.length ? at(i + 1) : end, y);
    }
    return;
  }
  for (let i = last - 1; i >= first; i -= 1) {
    const y = chart.y(column[i]);
    path.lineTo(i + 1 < level.x.length ? at(i + 1) : end, y);
    path.lineTo(at(i), y);
  }
}

function drawStack(chart) {
  const { context, panel } = chart;
  const { level, first, last } = chart.seen;
  let lower = new Float64Array(level.x.length);
  level.groups.forEach((column, group) => {
    const upper = lower.slice();
    let used = 0;
    for (let i = first; i < last; i += 1) {
      upper[i] += Math.max(column[i], 0);
      used = Math.max(used, column[i]);
    }
    if (used > 0) {
      const path = new Path2D();
      trace(chart, path, upper, false);
      trace(chart, path, lower, true);
      path.closePath();
      context.fillStyle = fillOf(context, colourOf(panel, group), patternOf(panel, group));
      context.fill(path);
      drawBandLabel(chart, panel.groups[group], lower, upper);
    }
    lower = upper;
  });
  outline(chart, level.total, css("text"), [], last - first > chart.width ? 0.5 : 1.2); // dense steps would be a blot
  if (panel.reserved_peak_bytes > 0) outline(chart, level.reserved, css("text"), [6, 3], 1.4);
}

function outline(chart, column, colour, dash, lineWidth) {
  const path = new Path2D();
  trace(chart, path, column, false);
  chart.context.strokeStyle = colour;
  chart.context.setLineDash(dash);
  chart.context.lineWidth = lineWidth;
  chart.context.stroke(path);
  chart.context.setLineDash([]);
}

// The band's name where it stays thick enough over the width of the text.
function drawBandLabel(chart, name, lower, upper) {
  const { context, range, width } = chart;
  const { level, first, last } = chart.seen;
  const text = words(name);
  const need = context.measureText(text).width + 16;
  const slots = Math.floor((width - LEFT - RIGHT) / 8);
  const top = new Float64Array(slots).fill(-Infinity);
  const floor = new Float64Array(slots).fill(Infinity);
  let i = first;
  for (let slot = 0; slot < slots; slot += 1) {
    const end = range.toX(LEFT + (slot + 1) * 8, width);
    for (let held = true; held || (i + 1 < last && level.x[i + 1] <= end); held = false) {
      if (!held) i += 1; // what the slot begins with counts too
      top[slot] = Math.max(top[slot], chart.y(upper[i]));
      floor[slot] = Math.min(floor[slot], chart.y(lower[i]));
    }
  }
  let best = null;
  const span = Math.ceil(need / 8);
  for (let slot = 1; slot + span < slots; slot += 2) {
    const high = Math.max(...top.subarray(slot, slot + span));
    const low = Math.min(...floor.subarray(slot, slot + span));
    if (low - high >= 17 && (!best || low - high > best.room + 4)) best = { room: low - high, x: LEFT + (slot + span / 2) * 8, y: (low + high) / 2 };
  }
  if (!best) return;
  context.textAlign = "center";
  pill(context, text, best.x, best.y);
}

function pill(context, text, x, y) {
  const half = context.measureText(text).width / 2 + 6;
  context.fillStyle = css("pill");
  context.beginPath();
  context.roundRect(x - half, y - 9, 2 * half, 18, 9);
  context.fill();
  context.fillStyle = css("text");
  context.fillText(text, x, y + 0.5);
}

const LINE_DASHES = { promised: [], budget: [10, 4, 2, 4], device: [2, 3] };

// Horizontal lines, each with its name on it; the names stand beside each other, so close lines do not hide them.
function drawLines(chart) {
  const { context, width, panel } = chart;
  const shown = panel.lines.filter((line) => line.bytes <= chart.scale);
  for (const line of shown) {
    const y = Math.round(chart.y(line.bytes)) + 0.5;
    context.strokeStyle = css(line.name === "promised" ? "promise" : "limit");
    context.lineWidth = 2;
    context.setLineDash(LINE_DASHES[line.name]);
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(width - RIGHT, y);
    context.stroke();
    context.setLineDash([]);
  }
  let right = width - RIGHT - 12;
  for (const line of shown) {
    const text = `${line.name} ${formatBytes(line.bytes)}`;
    const half = context.measureText(text).width / 2 + 6;
    context.textAlign = "center";
    pill(context, text, right - half, Math.round(chart.y(line.bytes)));
    right -= 2 * half + 10;
  }
}

function drawMarks(chart) {
  const { context, width, height, range, panel } = chart;
  const floor = height - chart.bottom;
  const upright = (x, colour, dash) => {
    const pixel = range.toPixel(x, width);
    if (pixel < LEFT - 1 || pixel > width - RIGHT + 1) return null;
    context.strokeStyle = colour;
    context.lineWidth = 1.5;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(pixel, 18);
    context.lineTo(pixel, floor);
    context.stroke();
    context.setLineDash([]);
    return pixel;
  };
  const label = (pixel, text, colour) => {
    const half = context.measureText(text).width / 2 + 4;
    context.textAlign = "center";
    context.fillStyle = colour;
    context.fillText(text, Math.min(Math.max(pixel, LEFT + half), width - RIGHT - half), 8);
  };
  const peak = range.toPixel(panel.peak.x, width);
  if (panel.peak.allocated_bytes > 0 && peak >= LEFT - 1 && peak <= width - RIGHT + 1) {
    const y = chart.y(panel.peak.allocated_bytes);
    context.fillStyle = css("text");
    context.beginPath();
    context.moveTo(peak, y - 2);
    context.lineTo(peak - 5, y - 10);
    context.lineTo(peak + 5, y - 10);
    context.fill();
    if (!panel.ooms.length) label(peak, `peak ${formatBytes(panel.peak.allocated_bytes)}`, css("text"));
  }
  for (const oom of panel.ooms) {
    const pixel = upright(panel.timed ? oom.time_ns : oom.event, css("alarm"), []);
    if (pixel !== null) label(pixel, `✕ out of memory: ${formatBytes(oom.bytes)} asked`, css("alarm"));
  }
  upright(chart.picked, css("accent"), [3, 3]);
  if (chart.drag) {
    context.fillStyle = css("selection");
    context.fillRect(Math.min(chart.drag.from, chart.drag.to), chart.top - 12, Math.abs(chart.drag.to - chart.drag.from), floor - chart.top + 12);
  }
}

function listenForMoves(chart) {
  const { canvas, range, tooltip } = chart;
  const pixelOf = (event) => Math.min(Math.max(event.clientX - canvas.getBoundingClientRect().left, LEFT), chart.width - RIGHT);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) range.pan(Math.sign(event.deltaX || event.deltaY) * 0.1);
    else range.zoom(event.deltaY > 0 ? 1.25 : 0.8, range.toX(pixelOf(event), chart.width));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    const at = pixelOf(event);
    chart.drag = { from: at, to: at, pans: event.shiftKey, low: range.low, high: range.high };
  });
  canvas.addEventListener("pointermove", (event) => {
    const at = pixelOf(event);
    if (chart.drag && chart.drag.pans) {
      const by = ((chart.drag.from - at) / (chart.width - LEFT - RIGHT)) * (chart.drag.high - chart.drag.low);
      range.set(chart.drag.low + by, chart.drag.high + by);
    } else if (chart.drag) {
      chart.drag.to = at;
      chart.draw();
    }
    showMoment(chart, event, at);
  });
  canvas.addEventListener("pointerup", (event) => {
    const { drag } = chart;
    chart.drag = null;
    if (!drag || drag.pans) return;
    const [from, to] = [Math.min(drag.from, drag.to), Math.max(drag.from, drag.to)];
    if (to - from > 5) range.set(range.toX(from, chart.width), range.toX(to, chart.width));
    else {
      const { level, index } = chart.sampleAt(pixelOf(event));
      chart.pickEvent(level.event[index]);
    }
  });
  canvas.addEventListener("dblclick", () => range.set(...range.full));
  canvas.addEventListener("pointerleave", () => tooltip.hide());
}

function showMoment(chart, event, pixel) {
  const { panel, tooltip } = chart;
  if (!chart.seen || chart.seen.last <= chart.seen.first) return;
  const { level, index } = chart.sampleAt(pixel);
  const head = momentText(panel, level.event[index], panel.timed ? level.time_ns[index] / 1e9 : null);
  const rows = [["allocated", formatBytes(level.total[index])]];
  if (panel.reserved_peak_bytes > 0) rows.push(["reserved", formatBytes(level.reserved[index])]);
  for (let group = panel.groups.length - 1; group >= 0; group -= 1) {
    const bytes = level.groups[group][index];
    if (bytes > 0) rows.push([words(panel.groups[group]), formatBytes(bytes), swatch(panel, group)]);
  }
  tooltip.show(event, head, rows);
}

function momentText(panel, event, time_s) {
  const at = time_s === null ? "" : `${formatSeconds(time_s)}, `;
  return `${at}event ${formatCount(event)}`;
}

function chartKeys(chart) {
  const { range, panel } = chart;
  return {
    ArrowLeft: (event) => (event.shiftKey ? range.pan(-0.1) : chart.step(-1)),
    ArrowRight: (event) => (event.shiftKey ? range.pan(0.1) : chart.step(1)),
    PageUp: () => range.pan(-0.5),
    PageDown: () => range.pan(0.5),
    "+": () => range.zoom(0.5, chart.picked),
    "=": () => range.zoom(0.5, chart.picked),
    "-": () => range.zoom(2, chart.picked),
    Home: () => chart.pickEvent(panel.first_event),
    End: () => chart.pickEvent(panel.last_event),
    Enter: () => chart.pickEvent(panel.peak.event),
    Escape: () => range.set(...range.full),
    0: () => range.set(...range.full),
  };
}

function listenForKeys(canvas, keys) {
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key](event);
  });
}
