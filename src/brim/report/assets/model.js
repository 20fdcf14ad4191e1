// One tier of one timeline: what to draw at a zoom, and what was held at a moment.

const KIND = { ALLOC: 0, FREE: 1, SEGMENT_ALLOC: 3, SEGMENT_FREE: 4, OOM: 6 };
const MOST_SAMPLES = 4000;

// The number of entries of an ascending column that are <= value.
function upTo(column, value) {
  let low = 0;
  let high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

class Segments {
  constructor(rows) {
    this.found = new Map();
    rows.address.forEach((address, i) => this.found.set(address, { bytes: rows.bytes[i], stream: rows.stream[i] }));
  }

  giveBack(address, bytes) {
    const exact = this.found.get(address);
    if (exact && exact.bytes === bytes) {
      this.found.delete(address);
      return;
    }
    for (const [start, segment] of [...this.found]) {
      const end = start + segment.bytes;
      if (end <= address || start >= address + bytes) continue;
      this.found.delete(start);
      if (start < address) this.found.set(start, { bytes: address - start, stream: segment.stream });
      const rest = end - (address + bytes);
      if (rest > 0) this.found.set(address + bytes, { bytes: rest, stream: segment.stream });
    }
  }
}

// Expandable segments are mapped piece by piece and blocks lie across the pieces: then neighbours are one segment.
function joined(segments, blocks) {
  const starts = Float64Array.from(segments, ([address]) => address);
  const across = blocks.some(([address, block]) => {
    const at = upTo(starts, address) - 1;
    return (
      at >= 0 &&
      address < starts[at] + segments[at][1].bytes &&
      address + block.bytes > starts[at] + segments[at][1].bytes
    );
  });
  if (!across) return segments;
  const made = [];
  for (const [address, segment] of segments) {
    const last = made[made.length - 1];
    if (last && last[0] + last[1].bytes === address && last[1].stream === segment.stream)
      last[1].bytes += segment.bytes;
    else made.push([address, { ...segment }]);
  }
  return made;
}

class Panel {
  constructor(view, data) {
    Object.assign(this, data);
    this.view = view;
    this.timed = view.axis === "time";
    this.levels.push(this.exactLevel());
    for (const level of this.levels) {
      level.x = this.timed ? level.time_ns : level.event;
      level.total = new Float64Array(level.x.length);
      for (const group of level.groups) for (let i = 0; i < group.length; i += 1) level.total[i] += group[i];
    }
    const exact = this.levels[this.levels.length - 1];
    this.whole = data.exact.last - data.exact.first === data.events;
    this.exactRange = this.whole ? [-Infinity, Infinity] : [exact.x[0], exact.x[exact.x.length - 1]];
    this.peak.time_ns = exact.time_ns[this.peak.position - data.exact.first];
    this.peak.x = this.timed ? this.peak.time_ns : this.peak.event;
    this.most = Math.max(this.peak.allocated_bytes, this.reserved_peak_bytes, 1);
    this.stackOf = [];
    let at = 0;
    for (const length of this.owners.stack_lengths) {
      this.stackOf.push(Array.from(this.owners.stack_frames.slice(at, at + length)));
      at += length;
    }
  }

  // The events around the peak as a level of their own: sums over what was held before the first of them.
  exactLevel() {
    const { exact, owners, groups } = this;
    const base = this.moments.find((moment) => moment.position === exact.first - 1);
    const sums = new Float64Array(groups.length);
    for (const rows of [base.blocks, base.loose])
      rows.owner.forEach((owner, i) => (sums[owners.group[owner]] += rows.bytes[i]));
    let reserved = base.segments.bytes.reduce((sum, bytes) => sum + bytes, 0);
    const count = exact.event.length;
    const level = {
      event: exact.event,
      time_ns: exact.time_ns,
      reserved: new Float64Array(count),
      groups: groups.map(() => new Float64Array(count)),
    };
    for (let i = 0; i < count; i += 1) {
      const kind = exact.kind[i];
      if (kind === KIND.ALLOC || kind === KIND.FREE) sums[owners.group[exact.owner[i]]] += exact.bytes[i];
      else reserved += exact.bytes[i];
      level.reserved[i] = reserved;
      for (let group = 0; group < sums.length; group += 1) level.groups[group][i] = sums[group];
    }
    return level;
  }

  // The finest level that shows [low, high] in few enough samples, and the samples [first, last) of it.
  visible(low, high) {
    for (let index = this.levels.length - 1; index >= 0; index -= 1) {
      const level = this.levels[index];
      const finest = index === this.levels.length - 1;
      if (finest && (low < this.exactRange[0] || high > this.exactRange[1]) && index > 0) continue;
      const first = Math.max(upTo(level.x, low) - 1, 0);
      const last = Math.min(upTo(level.x, high) + 1, level.x.length);
      if (last - first <= MOST_SAMPLES || index === 0) return { level, first, last, exact: finest };
    }
    return null;
  }

  // Bytes after `event`, by the finest level that knows it.
  sample(event) {
    const finest = this.levels[this.levels.length - 1];
    const inside = this.whole || (event >= finest.event[0] && event <= finest.event[finest.event.length - 1]);
    const level = inside || this.levels.length === 1 ? finest : this.levels[this.levels.length - 2];
    const at = Math.max(upTo(level.event, event) - 1, 0);
    return {
      event: level.event[at],
      time_s: this.timed ? level.time_ns[at] / 1e9 : null,
      x: level.x[at],
      allocated_bytes: level.total[at],
      reserved_bytes: level.reserved[at],
      groups: level.groups.map((column) => column[at]),
    };
  }

  // What was held after `event`: exactly, or (a long run, away from its peak) at the nearest moment that was kept.
  state(event) {
    const { exact } = this;
    const count = exact.event.length;
    const inside = this.whole || (event >= exact.event[0] && event <= exact.event[count - 1]);
    const near = (best, moment) => (Math.abs(moment.event - event) < Math.abs(best.event - event) ? moment : best);
    const start = inside
      ? this.moments.find((moment) => moment.position === exact.first - 1)
      : this.moments.reduce(near);
    const held = {
      event: start.event,
      exact: inside,
      blocks: new Map(),
      loose: new Map(),
      segments: new Segments(start.segments),
    };
    start.blocks.address.forEach((address, i) =>
      held.blocks.set(address, { bytes: start.blocks.bytes[i], owner: start.blocks.owner[i] }),
    );
    start.loose.owner.forEach((owner, i) =>
      held.loose.set(owner, { bytes: start.loose.bytes[i], count: start.loose.count[i] }),
    );
    if (inside) {
      const last = upTo(exact.event, event);
      for (let i = 0; i < last; i += 1) this.apply(held, i);
      held.event = last ? exact.event[last - 1] : event;
    }
    return held;
  }

  apply(held, i) {
    const { kind, bytes, address, owner, stream } = this.exact;
    const at = address[i];
    if (kind[i] === KIND.SEGMENT_ALLOC && at >= 0)
      held.segments.found.set(at, { bytes: bytes[i], stream: stream[i] });
    else if (kind[i] === KIND.SEGMENT_FREE && at >= 0) held.segments.giveBack(at, -bytes[i]);
    else if (kind[i] === KIND.ALLOC && at >= 0) held.blocks.set(at, { bytes: bytes[i], owner: owner[i] });
    else if (kind[i] === KIND.FREE && at >= 0 && held.blocks.has(at)) held.blocks.delete(at);
    else if (kind[i] === KIND.ALLOC || kind[i] === KIND.FREE) {
      const sum = held.loose.get(owner[i]) || { bytes: 0, count: 0 };
      sum.bytes += bytes[i];
      sum.count += bytes[i] > 0 ? 1 : -1;
      held.loose.set(owner[i], sum);
    }
  }

  // owner -> bytes and count of blocks
  byOwner(held) {
    const sums = new Map();
    const add = (owner, bytes, count) => {
      const sum = sums.get(owner) || { bytes: 0, count: 0 };
      sum.bytes += bytes;
      sum.count += count;
      sums.set(owner, sum);
    };
    held.blocks.forEach((block) => add(block.owner, block.bytes, 1));
    held.loose.forEach((sum, owner) => add(owner, sum.bytes, sum.count));
    return sums;
  }

  framesOf(owner) {
    const stack = this.owners.stack[owner];
    return stack < 0 ? [] : this.stackOf[stack].map((frame) => this.owners.frames[frame]);
  }

  // Name -> {bytes, count}: of groups, of modules, or of stack frames (with all that they called).
  breakdown(held, by) {
    const found = new Map();
    this.byOwner(held).forEach((sum, owner) => {
      let names = [this.owners.module[owner] || "not known"];
      if (by === "group") names = [this.groups[this.owners.group[owner]]];
      if (by === "frame") names = new Set(this.framesOf(owner));
      for (const name of names) {
        const entry = found.get(name) || { bytes: 0, count: 0 };
        entry.bytes += sum.bytes;
        entry.count += sum.count;
        found.set(name, entry);
      }
    });
    return new Map([...found].filter(([, entry]) => entry.bytes !== 0).sort((a, b) => b[1].bytes - a[1].bytes));
  }

  // Segments by address, each cut into pieces: blocks (owner >= 0) and holes (owner -1).
  pieces(held) {
    const blocks = [...held.blocks].sort((a, b) => a[0] - b[0]);
    const segments = joined(
      [...held.segments.found].sort((a, b) => a[0] - b[0]),
      blocks,
    );
    let at = 0;
    return segments.map(([address, segment]) => {
      const end = address + segment.bytes;
      const made = [];
      let next = address;
      while (at < blocks.length && blocks[at][0] < address) at += 1;
      for (; at < blocks.length && blocks[at][0] < end; at += 1) {
        const [start, block] = blocks[at];
        if (start > next) made.push({ address: next, bytes: start - next, owner: -1 });
        made.push({ address: start, bytes: Math.min(block.bytes, end - start), owner: block.owner });
        next = Math.max(next, start + block.bytes);
      }
      if (next < end) made.push({ address: next, bytes: end - next, owner: -1 });
      return { address, bytes: segment.bytes, stream: segment.stream, pieces: made };
    });
  }
}
