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
    this.top = panel.view.phases.length ? 44 : 26;
    this.picked = panel.peak.x;
    this.canvas = element("canvas", {
      class: "chart",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "zoomable chart",
    });
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
    drawPhases(this);
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
    const axis = panel.timed ? "time" : "events";
    return (
      `Memory in ${panel.tier.toUpperCase()} over ${axis}: ` +
      `peak ${formatBytes(panel.peak.allocated_bytes)} allocated at ${at}, ` +
      `${formatBytes(panel.reserved_peak_bytes)} reserved at most. Arrows pick a moment, plus and minus zoom, ` +
      "Home and End go to the ends, Enter to the peak, Escape shows all."
    );
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
    if (this.last && this.last.level === level && this.last.x === this.picked)
      next = Math.min(Math.max(this.last.index + by, 0), level.x.length - 1);
    this.last = { level, index: next, x: level.x[next] };
    this.pickEvent(level.event[next]);
  }
}

function listenForMoves(chart) {
  const { canvas, range, tooltip } = chart;
  const pixelOf = (event) =>
    Math.min(Math.max(event.clientX - canvas.getBoundingClientRect().left, LEFT), chart.width - RIGHT);
  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
        range.pan(Math.sign(event.deltaX || event.deltaY) * 0.1);
      else range.zoom(event.deltaY > 0 ? 1.25 : 0.8, range.toX(pixelOf(event), chart.width));
    },
    { passive: false },
  );
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

const endOf = (phase) => (phase.duration_ns > 0 ? phase.time_ns + phase.duration_ns : Infinity);

function momentText(panel, event, time_s) {
  const at = time_s === null ? "" : `${formatSeconds(time_s)}, `;
  const phase = panel.view.phases.findLast((one) =>
    time_s === null ? one.event <= event : one.time_ns <= time_s * 1e9 && time_s * 1e9 < endOf(one),
  );
  return `${at}event ${formatCount(event)}${phase ? ` (${phase.name})` : ""}`;
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
