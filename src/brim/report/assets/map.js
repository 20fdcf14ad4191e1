// The address map: all segments end to end by address, wrapped into rows; blocks in their colours, holes empty.

const MAP_ROW = 22;
const MAP_GAP = 6;
const MAP_ROWS = 14;

class AddressMap {
  constructor(panel, tooltip, onPiece) {
    Object.assign(this, { panel, tooltip, onPiece, segments: [], flat: [], chosen: -1 });
    this.canvas = element("canvas", {
      class: "map",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "address map",
    });
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => tooltip.hide());
    this.canvas.addEventListener("click", (event) => this.choose(this.find(event)));
    listenForKeys(this.canvas, this.keys());
  }

  set(segments) {
    this.segments = segments;
    this.total = segments.reduce((sum, segment) => sum + segment.bytes, 0);
    this.chosen = -1;
    this.flat = [];
    let at = 0;
    for (const segment of segments) {
      for (const piece of segment.pieces)
        this.flat.push({ ...piece, segment, at: at + (piece.address - segment.address) });
      segment.at = at;
      at += segment.bytes;
    }
    this.holes = this.flat.filter((piece) => piece.owner < 0);
    this.starts = Float64Array.from(this.flat, (piece) => piece.at);
    this.draw();
  }

  draw() {
    this.rows = Math.max(1, Math.min(MAP_ROWS, Math.ceil(this.total / (8 * 1024 * 1024))));
    const { context, width } = prepare(this.canvas, this.rows * (MAP_ROW + MAP_GAP) + 2);
    Object.assign(this, { context, width });
    this.perRow = this.total / this.rows || 1;
    context.textAlign = "right";
    context.fillStyle = css("soft");
    for (let row = 0; row < this.rows; row += 1)
      context.fillText(formatBytes(row * this.perRow), LEFT - 8, row * (MAP_ROW + MAP_GAP) + MAP_ROW / 2);
    for (const segment of this.segments)
      this.box(segment.at, segment.bytes, (x, y, w) => {
        context.fillStyle = css("hole");
        context.fillRect(x, y, w, MAP_ROW);
      });
    for (const piece of this.flat) if (piece.owner >= 0) this.paint(piece);
    context.fillStyle = css("text");
    for (const segment of this.segments)
      this.box(segment.at, 0, (x, y) => context.fillRect(x - 0.5, y - 2, 1, MAP_ROW + 4));
    if (this.chosen >= 0) {
      context.strokeStyle = css("accent");
      context.lineWidth = 3;
      const { at, bytes } = this.flat[this.chosen];
      this.box(at, bytes, (x, y, w) => context.strokeRect(x - 1, y - 1, Math.max(w, 2) + 2, MAP_ROW + 2));
    }
    const held = this.flat.length - this.holes.length;
    this.canvas.setAttribute(
      "aria-label",
      `Address map: ${several(this.segments.length, "segment")} of ${formatBytes(this.total)}, ` +
        `${several(held, "block")}, ${several(this.holes.length, "hole")}. ` +
        "Arrows go from piece to piece, H to the next largest hole.",
    );
  }

  paint(piece) {
    const { context, panel } = this;
    const group = panel.owners.group[piece.owner];
    context.fillStyle = fillOf(context, colourOf(panel, group), patternOf(panel, group));
    this.box(piece.at, piece.bytes, (x, y, w) => {
      context.fillRect(x, y, w, MAP_ROW);
      if (w > 4) {
        context.strokeStyle = css("edge");
        context.lineWidth = 1;
        context.strokeRect(x + 0.5, y + 0.5, w - 1, MAP_ROW - 1);
      }
    });
  }

  // Calls draw(x, y, width) for each row that [at, at + bytes) touches.
  box(at, bytes, draw) {
    const scale = (this.width - LEFT - RIGHT) / this.perRow;
    let row = Math.min(Math.floor(at / this.perRow + 1e-12), this.rows - 1);
    let from = at;
    do {
      const end = Math.min(at + bytes, (row + 1) * this.perRow);
      draw(
        LEFT + (from - row * this.perRow) * scale,
        row * (MAP_ROW + MAP_GAP) + 2,
        Math.max((end - from) * scale, 0),
      );
      from = end;
      row += 1;
    } while (from < at + bytes - 0.5 && row < this.rows);
  }

  find(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - 2) / (MAP_ROW + MAP_GAP));
    const share = (event.clientX - box.left - LEFT) / (this.width - LEFT - RIGHT);
    if (share < 0 || share > 1 || row < 0 || row >= this.rows) return -1;
    return upTo(this.starts, (row + share) * this.perRow) - 1;
  }

  hover(event) {
    const piece = this.flat[this.find(event)];
    if (!piece) this.tooltip.hide();
    else this.tooltip.show(event, words(this.nameOf(piece)), this.rowsOf(piece));
  }

  nameOf(piece) {
    return piece.owner < 0
      ? "hole"
      : this.panel.owners.module[piece.owner] || this.panel.owners.label[piece.owner] || "block";
  }

  rowsOf(piece) {
    const { panel } = this;
    const rows = [
      ["bytes", formatBytes(piece.bytes)],
      ["address", `0x${piece.address.toString(16)}`],
    ];
    if (piece.owner >= 0) {
      const group = panel.owners.group[piece.owner];
      if (panel.grouped_by === "category") rows.push([words(panel.groups[group]), "", swatch(panel, group)]);
      if (panel.owners.label[piece.owner]) rows.push(["asked by", words(panel.owners.label[piece.owner])]);
    }
    rows.push(["in a segment of", formatBytes(piece.segment.bytes)]);
    if (piece.segment.stream) rows.push(["stream", String(piece.segment.stream)]);
    return rows;
  }

  choose(index) {
    if (index < 0 || index >= this.flat.length) return;
    this.chosen = index;
    this.draw();
    this.onPiece(this.flat[index]);
  }

  keys() {
    const last = () => this.flat.length - 1;
    const byHole = () => {
      const order = [...this.holes].sort((a, b) => b.bytes - a.bytes);
      const now = order.indexOf(this.flat[this.chosen]);
      if (order.length) this.choose(this.flat.indexOf(order[(now + 1) % order.length]));
    };
    return {
      ArrowRight: () => this.choose(Math.min(this.chosen + 1, last())),
      ArrowLeft: () => this.choose(Math.max(this.chosen - 1, 0)),
      Home: () => this.choose(0),
      End: () => this.choose(last()),
      h: byHole,
      H: byHole,
    };
  }
}
