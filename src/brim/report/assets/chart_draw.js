// The picture of a chart: axes, stacked bands, lines and marks.

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
    if (low - high >= 17 && (!best || low - high > best.room + 4))
      best = { room: low - high, x: LEFT + (slot + span / 2) * 8, y: (low + high) / 2 };
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

// Which part of a step it is, named above the picture; a line where each begins. What is too narrow has no name.
function drawPhases(chart) {
  const { context, width, height, range, panel } = chart;
  const { phases } = panel.view;
  const [top, floor, right] = [17, height - chart.bottom, width - RIGHT];
  phases.forEach((phase, index) => {
    const pixel = (x) => Math.min(Math.max(range.toPixel(x, width), LEFT), right);
    const at = (one) => pixel(panel.timed ? one.time_ns : one.event);
    const next = index + 1 < phases.length ? at(phases[index + 1]) : right;
    const [from, to] = [at(phase), phase.duration_ns > 0 ? pixel(phase.time_ns + phase.duration_ns) : next];
    if (to - from < 1) return;
    context.fillStyle = css(index % 2 ? "page" : "grid");
    context.fillRect(from, top, to - from, 16);
    if (from > LEFT) {
      context.strokeStyle = css("grid");
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(Math.round(from) + 0.5, top);
      context.lineTo(Math.round(from) + 0.5, floor);
      context.stroke();
    }
    if (context.measureText(phase.name).width + 8 > to - from) return;
    context.textAlign = "center";
    context.fillStyle = css("soft");
    context.fillText(phase.name, (from + to) / 2, top + 8);
  });
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
    context.fillRect(
      Math.min(chart.drag.from, chart.drag.to),
      chart.top - 12,
      Math.abs(chart.drag.to - chart.drag.from),
      floor - chart.top + 12,
    );
  }
}
