// One tier of one timeline on the page: its figures, its picture, and what was held at the picked moment.

class Card {
  constructor(panel, range, most, tooltip, open) {
    Object.assign(this, { panel, range, tooltip });
    this.folds = true;
    this.chart = new Chart(panel, range, most, tooltip, (event) => this.pick(event));
    this.map = new AddressMap(panel, tooltip, (piece) => this.showPiece(piece));
    this.legend = element("ul", { class: "legend", "aria-label": "Legend, with bytes at the picked moment" });
    this.moment = element("p", { class: "moment", role: "status", "aria-live": "polite" });
    this.parts = element("div", { class: "parts" });
    this.addresses = element(
      "div",
      { class: "addresses" },
      element("h3", { text: "Addresses" }),
      (this.mapText = element("p", { class: "note" })),
      element("div", { class: "plot" }, this.map.canvas),
      (this.piece = element("p", { class: "piece", role: "status", "aria-live": "polite" })),
      (this.holes = element("div", { class: "parts" })),
    );
    this.details = element(
      "details",
      { class: "details", open, ontoggle: () => this.fill() },
      element("summary", { text: "At the picked moment" }),
      this.parts,
      this.addresses,
    );
    this.samples = element("details", { class: "details" }, element("summary", { text: "As a table" }));
    this.samples.addEventListener("toggle", () => this.fillSamples());
    const name = `${panel.view.title}: ${panel.tier.toUpperCase()}`;
    this.root = element(
      "section",
      { class: "card", "aria-label": name },
      element(
        "div",
        { class: "head" },
        element("h2", { text: panel.view.title }),
        element("span", { class: "tier", text: panel.tier.toUpperCase() }),
        this.buttons(),
      ),
      this.tiles(),
      element("div", { class: "plot" }, this.chart.canvas),
      this.legend,
      this.moment,
    );
    this.root.append(this.details, this.samples);
    range.listeners.push(() => this.chart.draw());
  }

  buttons() {
    const { chart, range, panel } = this;
    const make = (text, label, onclick) =>
      element("button", { type: "button", text, "aria-label": label, title: label, onclick });
    return element(
      "div",
      { class: "buttons", role: "toolbar", "aria-label": "Zoom" },
      make("Peak", "Pick the peak", () => chart.pickEvent(panel.peak.event)),
      make("+", "Zoom in on the picked moment", () => range.zoom(0.5, chart.picked)),
      make("−", "Zoom out", () => range.zoom(2, chart.picked)),
      make("All", "Show all", () => range.set(...range.full)),
    );
  }

  tiles() {
    const { panel } = this;
    const at = panel.timed
      ? `at ${formatSeconds(panel.peak.time_ns / 1e9)}`
      : `at event ${formatCount(panel.peak.event)}`;
    const list = element("dl", { class: "tiles" });
    const tile = (name, bytes, note) =>
      list.append(
        element(
          "div",
          {},
          element("dt", { text: name }),
          element("dd", { text: formatBytes(bytes), title: `${formatCount(bytes)} bytes` }),
          element("dd", { class: "soft", text: note }),
        ),
      );
    tile("peak allocated", panel.peak.allocated_bytes, at);
    if (panel.reserved_peak_bytes > 0) {
      tile("peak reserved", panel.reserved_peak_bytes, "held by the allocator");
      const idle = panel.peak.reserved_bytes - panel.peak.allocated_bytes;
      tile("reserved, not allocated", idle, "at the peak");
    }
    if (panel.context_bytes > 0) {
      const inside = Math.max(panel.reserved_peak_bytes, panel.peak.allocated_bytes);
      tile("process", inside + panel.context_bytes, `with ${formatBytes(panel.context_bytes)} of CUDA context`);
    }
    const notes = { promised: "by the plan", budget: "not to be passed", device: "capacity" };
    for (const line of panel.lines) tile(line.name, line.bytes, notes[line.name]);
    return list;
  }

  pick(event) {
    const { panel } = this;
    this.sample = panel.sample(event);
    this.stale = true;
    this.chart.picked = this.sample.x;
    this.chart.draw();
    const reserved = panel.reserved_peak_bytes > 0 ? `, ${formatBytes(this.sample.reserved_bytes)} reserved` : "";
    const allocated = `${formatBytes(this.sample.allocated_bytes)} allocated`;
    const at = momentText(panel, this.sample.event, this.sample.time_s);
    this.moment.textContent = `Picked: ${at}: ${allocated}${reserved}.`;
    this.fillLegend();
    this.fill();
  }

  fillLegend() {
    const { panel, sample } = this;
    const items = panel.groups.map((name, group) =>
      element(
        "li",
        {},
        swatch(panel, group),
        element("span", { text: words(name), title: name }),
        element("b", { text: formatBytes(sample.groups[group]) }),
      ),
    );
    if (panel.reserved_peak_bytes > 0)
      items.push(
        element(
          "li",
          {},
          element("span", { class: "dashes" }),
          element("span", { text: "reserved" }),
          element("b", { text: formatBytes(sample.reserved_bytes) }),
        ),
      );
    for (const line of panel.lines) {
      const off = line.bytes > this.chart.most * 1.06 ? " (above the picture)" : "";
      items.push(
        element(
          "li",
          {},
          element("span", { class: `rule ${line.name}` }),
          element("span", { text: `${line.name}${off}` }),
          element("b", { text: formatBytes(line.bytes) }),
        ),
      );
    }
    this.legend.replaceChildren(...items);
  }

  held() {
    if (this.stale || !this.state) this.state = this.panel.state(this.sample.event);
    this.stale = false;
    return this.state;
  }

  // The breakdowns and the map; only where they are open, as a long run's take a moment.
  fill() {
    if (!this.details.open || !this.sample) return;
    const { panel } = this;
    const held = this.held();
    const total = [...panel.byOwner(held).values()].reduce((sum, entry) => sum + entry.bytes, 0);
    const near = held.exact
      ? null
      : "Of this long run, blocks are kept for some moments and around the peak. " +
        `This is the nearest: event ${formatCount(held.event)}.`;
    const modules = [...panel.breakdown(held, "module")];
    const parts = [];
    if (panel.grouped_by === "category") {
      const mark = (name) => swatch(panel, panel.groups.indexOf(name));
      parts.push(breakdownTable("By category", near, [...panel.breakdown(held, "group")], total, mark));
    }
    const fold = folded(modules);
    const folds = fold.length < modules.length;
    const shown = folds && this.folds ? fold : modules;
    const who = modules.some(([name]) => FRAME.test(name)) ? "By who asked" : "By module";
    parts.push(breakdownTable(who, parts.length ? null : near, shown, total, null, folds ? this.foldBox() : null));
    const frames = [...panel.breakdown(held, "frame")];
    const inside = !frames.some(([name]) => /[\s:/]/.test(name));
    const title = inside ? "By module, with all inside it" : "By stack frame, with all it calls";
    if (frames.length) parts.push(breakdownTable(title, null, frames, total, null));
    this.parts.replaceChildren(...parts);
    this.fillMap(held);
  }

  foldBox() {
    const box = element("input", {
      type: "checkbox",
      checked: this.folds,
      onchange: () => {
        this.folds = box.checked;
        this.fill();
      },
    });
    return element("label", { class: "fold" }, box, "fold numbered modules");
  }

  fillMap(held) {
    const segments = this.panel.pieces(held);
    this.addresses.hidden = segments.length === 0;
    if (!segments.length) return;
    this.map.set(segments);
    this.piece.textContent = "";
    const { holes } = this.map;
    const free = holes.reduce((sum, hole) => sum + hole.bytes, 0);
    const largest = holes.reduce((most, hole) => Math.max(most, hole.bytes), 0);
    this.mapText.textContent =
      `${several(segments.length, "segment")} of ${formatBytes(this.map.total)}, end to end by address; ` +
      `a row is ${formatBytes(this.map.perRow)}. ` +
      (holes.length
        ? `${formatBytes(free)} free in ${several(holes.length, "hole")}, the largest ${formatBytes(largest)}.`
        : "No holes.");
    const sizes = [
      ["under 1 MiB", 0, 2 ** 20],
      ["1 to 20 MiB", 2 ** 20, 20 * 2 ** 20],
      ["20 to 200 MiB", 20 * 2 ** 20, 200 * 2 ** 20],
      ["200 MiB and more", 200 * 2 ** 20, Infinity],
    ];
    const bySize = sizes
      .map(([name, low, high]) => {
        const inside = holes.filter((hole) => hole.bytes >= low && hole.bytes < high);
        return [
          `${name}: ${formatCount(inside.length)}`,
          { bytes: inside.reduce((sum, hole) => sum + hole.bytes, 0), count: inside.length },
        ];
      })
      .filter(([, entry]) => entry.count);
    this.holes.replaceChildren(
      ...(holes.length
        ? [breakdownTable("Holes by size", null, bySize, free, null), this.pinned(segments, free)]
        : []),
    );
  }

  // Segments with most free in them, and what keeps each from being given back.
  pinned(segments, free) {
    const rows = segments
      .map((segment) => {
        const blocks = segment.pieces.filter((piece) => piece.owner >= 0);
        const hole = segment.pieces.reduce((sum, piece) => sum + (piece.owner < 0 ? piece.bytes : 0), 0);
        const largest = blocks.reduce((most, piece) => (!most || piece.bytes > most.bytes ? piece : most), null);
        const who = largest
          ? `${several(blocks.length, "block")}, the largest ${words(this.map.nameOf(largest))}`
          : "nobody: cached";
        return [
          `${formatBytes(segment.bytes)} at 0x${segment.address.toString(16)}: ${who}`,
          { bytes: hole, count: blocks.length },
        ];
      })
      .filter(([, entry]) => entry.bytes > 0)
      .sort((a, b) => b[1].bytes - a[1].bytes);
    return breakdownTable("Free in segments, and who holds them", null, rows, free, null);
  }

  showPiece(piece) {
    const rows = this.map
      .rowsOf(piece)
      .map(([name, value]) => (value ? `${name} ${value}` : name))
      .join(", ");
    const frames = piece.owner >= 0 ? this.panel.framesOf(piece.owner).join(" ← ") : "";
    this.piece.textContent = `${words(this.map.nameOf(piece))}: ${rows}.${frames ? ` ${frames}` : ""}`;
  }

  // The picture in words, for those who do not see it.
  fillSamples() {
    if (!this.samples.open || this.samples.querySelector("table")) return;
    const { panel } = this;
    const { level, first, last } = panel.visible(...this.range.full);
    const chosen = new Set([level.event.indexOf(panel.peak.event)].filter((i) => i >= 0));
    for (let i = 0; i < 24; i += 1) chosen.add(first + Math.floor(((last - 1 - first) * i) / 23));
    const columns = [
      panel.timed ? "time_s" : "event",
      "allocated_bytes",
      ...(panel.reserved_peak_bytes ? ["reserved_bytes"] : []),
      ...panel.groups.map((name) => `${name}_bytes`),
    ];
    const rows = [...chosen]
      .sort((a, b) => a - b)
      .map((i) => [
        panel.timed ? level.time_ns[i] / 1e9 : level.event[i],
        level.total[i],
        ...(panel.reserved_peak_bytes ? [level.reserved[i]] : []),
        ...level.groups.map((column) => column[i]),
      ]);
    this.samples.append(
      givenTable({ title: "Memory at moments evenly spread, and at the peak", note: "", columns, rows }),
    );
  }

  // The figures behind the picture, for scripts and tests.
  figures() {
    const { panel } = this;
    const groups = (values) => Object.fromEntries(panel.groups.map((name, i) => [name, values[i]]));
    const entries = (by) =>
      Object.fromEntries([...panel.breakdown(this.held(), by)].map(([name, entry]) => [name, entry.bytes]));
    return {
      title: panel.view.title,
      tier: panel.tier,
      events: panel.events,
      lines: panel.lines,
      ooms: panel.ooms,
      peak: {
        ...panel.sample(panel.peak.event),
        allocated_bytes: panel.peak.allocated_bytes,
        groups: groups(panel.sample(panel.peak.event).groups),
      },
      reserved_peak_bytes: panel.reserved_peak_bytes,
      picked: () => ({
        ...this.sample,
        groups: groups(this.sample.groups),
        exact: this.held().exact,
        module: entries("module"),
        frame: entries("frame"),
      }),
      segments: () => panel.pieces(this.held()),
      pick: (event) => this.chart.pickEvent(event),
      range: () => [this.range.low, this.range.high],
      seen: () => ({ exact: this.chart.seen.exact, samples: this.chart.seen.last - this.chart.seen.first }),
    };
  }
}
