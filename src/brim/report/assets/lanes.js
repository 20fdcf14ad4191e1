// Lanes of computing, copying and waiting, under the picture of memory and on its axis.

const LANE_HEIGHT = 34;

class Lanes {
  constructor(view, range, tooltip) {
    Object.assign(this, { lanes: view.lanes, range, tooltip });
    this.canvas = element("canvas", {
      class: "lanes",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "zoomable lanes",
    });
    listenForKeys(this.canvas, {
      ArrowLeft: () => range.pan(-0.1),
      ArrowRight: () => range.pan(0.1),
      "+": () => range.zoom(0.5, (range.low + range.high) / 2),
      "-": () => range.zoom(2, (range.low + range.high) / 2),
      Escape: () => range.set(...range.full),
    });
    this.canvas.setAttribute(
      "aria-label",
      view.lanes.map((lane) => `${lane.name}: busy ${formatSeconds(laneBusy(lane) / 1e9)}`).join("; "),
    );
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => tooltip.hide());
    this.canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const at = event.clientX - this.canvas.getBoundingClientRect().left;
        range.zoom(event.deltaY > 0 ? 1.25 : 0.8, range.toX(at, this.width));
      },
      { passive: false },
    );
    for (const lane of this.lanes) {
      lane.latest = new Float64Array(lane.start_ns.length); // the latest end so far: spans of a lane may overlap
      let latest = -Infinity;
      lane.start_ns.forEach((start, i) => (lane.latest[i] = latest = Math.max(latest, start + lane.duration_ns[i])));
    }
  }

  draw() {
    const height = this.lanes.length * LANE_HEIGHT + 28;
    const { context, width } = prepare(this.canvas, height);
    Object.assign(this, { context, width });
    this.lanes.forEach((lane, row) => this.drawLane(lane, row * LANE_HEIGHT));
    drawAxis(this, height - 26, true);
  }

  drawLane(lane, top) {
    const { context, width, range } = this;
    context.textAlign = "left";
    context.fillStyle = css("soft");
    context.fillText(`${lane.name}: ${formatSeconds(laneBusy(lane) / 1e9)}`, LEFT, top + 8);
    context.fillStyle = css("well");
    context.fillRect(LEFT, top + 16, width - LEFT - RIGHT, 14);
    const colour = { compute: CYCLE[2], copy: CYCLE[0], idle: CYCLE[1] }[lane.kind];
    context.fillStyle = lane.kind === "idle" ? fillOf(context, colour, "up") : colour;
    const covered = new Float64Array(Math.ceil(width) + 2);
    const first = upTo(lane.latest, range.low);
    for (let i = first; i < lane.start_ns.length && lane.start_ns[i] <= range.high; i += 1) {
      const from = Math.max(range.toPixel(lane.start_ns[i], width), LEFT);
      const to = Math.min(range.toPixel(lane.start_ns[i] + lane.duration_ns[i], width), width - RIGHT);
      const density = lane.duration_ns[i] ? Math.min(lane.busy_ns[i] / lane.duration_ns[i], 1) : 1;
      if (to - from < 1.5) covered[Math.floor(from)] += Math.max(to - from, 0.15) * density;
      else {
        context.globalAlpha = 0.15 + 0.85 * density;
        context.fillRect(from, top + 16, to - from, 14);
      }
    }
    covered.forEach((share, pixel) => {
      if (!share) return;
      context.globalAlpha = Math.min(Math.max(share, 0.12), 1); // the share of the pixel that is busy
      context.fillRect(pixel, top + 16, 1, 14);
    });
    context.globalAlpha = 1;
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const lane = this.lanes[Math.floor((event.clientY - box.top) / LANE_HEIGHT)];
    const slack = (this.range.high - this.range.low) / this.width;
    const x = this.range.toX(event.clientX - box.left, this.width);
    const at = lane ? upTo(lane.start_ns, x + slack) - 1 : -1;
    if (at < 0 || lane.start_ns[at] + lane.duration_ns[at] < x - slack) {
      this.tooltip.hide();
      return;
    }
    const rows = [
      ["begins", formatSeconds(lane.start_ns[at] / 1e9)],
      ["takes", formatSeconds(lane.duration_ns[at] / 1e9)],
    ];
    if (lane.bytes[at]) {
      rows.push(["bytes", formatBytes(lane.bytes[at])]);
      if (lane.busy_ns[at]) rows.push(["rate", `${formatBytes(lane.bytes[at] / (lane.busy_ns[at] / 1e9))}/s`]);
    }
    if (lane.count[at] > 1) rows.push(["spans joined", formatCount(lane.count[at])]);
    this.tooltip.show(event, lane.label[at] || lane.name, rows);
  }
}

function laneBusy(lane) {
  return lane.busy_ns.reduce((sum, busy) => sum + busy, 0);
}
