// Puts the page together.

function themeButton(redraw) {
  const dark = () =>
    document.documentElement.dataset.theme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const button = element("button", {
    type: "button",
    class: "theme",
    "aria-label": "Dark or light",
    title: "Dark or light",
  });
  const name = () => (button.textContent = dark() ? "☀ Light" : "☾ Dark");
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    name();
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    name();
    redraw();
  });
  name();
  return button;
}

// Peaks side by side; differences to the first of the same tier.
function comparison(panels) {
  if (panels.length < 2) return null;
  const alike = panels.every((panel) => panel.grouped_by === "category");
  const names = alike ? [...new Set(panels.flatMap((panel) => panel.groups))] : [];
  const tierOf = (panel) => panels.find((other) => other.tier === panel.tier);
  const rows = panels.map((panel) => {
    const first = tierOf(panel);
    const change = first === panel ? null : panel.peak.allocated_bytes - first.peak.allocated_bytes;
    const sample = panel.sample(panel.peak.event);
    return [
      panel.view.title,
      panel.tier.toUpperCase(),
      panel.peak.allocated_bytes,
      panel.reserved_peak_bytes || null,
      change,
      ...names.map((name) => (panel.groups.includes(name) ? sample.groups[panel.groups.indexOf(name)] : null)),
    ];
  });
  const columns = [
    "run",
    "tier",
    "allocated_bytes",
    "reserved_bytes",
    "change_bytes",
    ...names.map((name) => `${name}_bytes`),
  ];
  return givenTable({
    title: "Peaks beside each other",
    note: "The change is to the first run of the same tier.",
    columns,
    rows,
  });
}

// What is shown of each view's axis: views whose times count from one moment share it.
function ranges(data) {
  const timed = data.views.filter((view) => view.axis === "time");
  const shared = data.one_axis ? new Range(0, Math.max(...timed.map((view) => view.end_ns), 1)) : null;
  return data.views.map((view) => {
    if (view.axis === "event") return new Range(0, Math.max(view.events - 1, 1));
    return shared || new Range(0, view.end_ns);
  });
}

function viewCards(view, range, scaleOf, tooltip, cards, drawn) {
  const panels = view.panels;
  const made = panels.map((panel) => {
    const card = new Card(panel, range, scaleOf(panel), tooltip, cards.length < 2);
    cards.push(card);
    drawn.push(
      () => card.chart.draw(),
      () => card.details.open && card.map.segments.length && card.map.draw(),
    );
    return card.root;
  });
  if (view.lanes.length) {
    const lanes = new Lanes(view, range, tooltip);
    range.listeners.push(() => lanes.draw());
    drawn.push(() => lanes.draw());
    const part = element(
      "div",
      { class: "lane-part" },
      element("h3", { text: "Computing, copying, waiting" }),
      element("div", { class: "plot" }, lanes.canvas),
    );
    if (made.length) cards[cards.length - panels.length].moment.after(part);
    else
      made.push(
        element(
          "section",
          { class: "card", "aria-label": view.title },
          element("div", { class: "head" }, element("h2", { text: view.title })),
          part,
        ),
      );
  }
  return made;
}

async function main() {
  const data = await unpack(JSON.parse(document.getElementById("data").textContent));
  const root = document.getElementById("page");
  const tooltip = new Tooltip();
  const cards = [];
  const drawn = [];
  for (const view of data.views) view.panels = view.panels.map((panel) => new Panel(view, panel));
  const panels = data.views.flatMap((view) => view.panels);
  const most = {};
  for (const panel of panels) {
    const near = panel.lines.map((line) => line.bytes).filter((bytes) => bytes <= panel.most * 1.6);
    panel.most = Math.max(panel.most, ...near);
    most[panel.tier] = Math.max(most[panel.tier] || 0, panel.most);
  }
  // One scale, so that runs can be compared; but not where one of them would be too flat to be read.
  const scaleOf = (panel) => (panel.most >= most[panel.tier] * 0.2 ? most[panel.tier] : panel.most);
  const redraw = () => {
    drawn.forEach((draw) => draw());
    cards.forEach((card) => card.sample && card.pick(card.sample.event));
  };
  const help =
    "Wheel or drag to zoom, shift and drag to move, click to pick a moment, double click to show all. By keyboard: " +
    "Tab to a picture, arrows to pick, + and − to zoom, shift and arrows to move, Home, End, Enter for the peak, " +
    "Escape for all.";
  root.replaceChildren(
    element("header", {}, element("h1", { text: data.title, title: data.title }), themeButton(redraw)),
    ...(data.verdict ? [element("p", { class: "verdict", text: data.verdict })] : []),
    ...data.notes.map((note) => element("p", { class: "lead", text: note })),
    ...(data.views.length ? [element("p", { class: "help", text: help })] : []),
  );
  const compared = comparison(panels);
  if (compared) root.append(compared);
  const shown = ranges(data);
  data.views.forEach((view, index) => root.append(...viewCards(view, shown[index], scaleOf, tooltip, cards, drawn)));
  const tables = data.tables.map(givenTable);
  if (tables.length) root.append(element("div", { class: "tables" }, ...tables));
  cards.forEach((card) => card.pick(card.panel.peak.event));
  redraw();
  window.addEventListener("resize", redraw);
  const lanes = data.views.flatMap((view) =>
    view.lanes.map((lane) => ({ name: lane.name, busy_s: laneBusy(lane) / 1e9 })),
  );
  window.brim = { title: data.title, verdict: data.verdict, lanes, tables: data.tables, panels: cards.map((card) => card.figures()) };
  document.documentElement.dataset.ready = "yes";
}

if (typeof DecompressionStream === "undefined") {
  document.getElementById("page").textContent =
    "This browser is too old for this report: it cannot unpack deflated data.";
} else {
  main().catch((error) => {
    document.getElementById("page").textContent = `This report is damaged: ${error}`;
    throw error;
  });
}
