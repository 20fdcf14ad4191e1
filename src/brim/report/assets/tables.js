// Tables: given ones, and breakdowns with bars.

const FIRST_ROWS = 12;
const MOST_ROWS = 1000;

function cellText(column, value, fact) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (/(^|_)bytes$/.test(column) || /_bytes(\.|$)/.test(fact)) return formatBytes(value);
  if (/_s$/.test(column) || /_s(\.|$)/.test(fact)) return formatSeconds(value);
  if (/_share$/.test(column) || /_share$/.test(fact)) return formatShare(value);
  return formatCount(value);
}

function givenTable(table) {
  const made = element("table", {});
  made.append(
    element(
      "caption",
      {},
      element("h2", { text: table.title }),
      table.note ? element("p", { text: table.note }) : null,
    ),
  );
  const numeric = table.columns.map(
    (_, i) => table.rows.length > 0 && table.rows.every((row) => row[i] === null || typeof row[i] === "number"),
  );
  const head = element("tr", {});
  table.columns.forEach((column, i) =>
    head.append(
      element("th", {
        scope: "col",
        class: numeric[i] ? "number" : null,
        text: words(column.replace(/_(bytes|s|share)$/, "")),
      }),
    ),
  );
  made.append(element("thead", {}, head));
  const body = element("tbody", {});
  made.append(body);
  const rows = table.rows.map((row) => {
    const fact = table.columns[0] === "fact" ? String(row[0]) : "";
    const made = element("tr", {});
    row.forEach((value, i) => {
      const text = cellText(table.columns[i], value, i ? fact : "");
      made.append(
        element("td", {
          class: numeric[i] ? "number" : null,
          title: typeof value === "number" ? formatCount(value) : null,
          text,
        }),
      );
    });
    return made;
  });
  return element("section", { class: "given" }, made, shortened(body, rows));
}

// Shows the first rows; the button, if there are more, shows up to MOST_ROWS.
function shortened(body, rows) {
  body.replaceChildren(...rows.slice(0, FIRST_ROWS));
  if (rows.length <= FIRST_ROWS) return null;
  const shown = Math.min(rows.length, MOST_ROWS);
  const text =
    shown < rows.length
      ? `Show ${formatCount(shown)} of ${formatCount(rows.length)}`
      : `Show all ${formatCount(rows.length)}`;
  const button = element("button", {
    type: "button",
    class: "more",
    text,
    onclick: () => {
      body.replaceChildren(...rows.slice(0, shown));
      button.remove();
    },
  });
  return button;
}

// Name -> {bytes, count} as rows with bars; `mark` gives what stands before a name.
function breakdownTable(title, note, entries, total, mark, extra = null) {
  const body = element("tbody", {});
  const rows = entries.map(([name, entry]) => {
    const share = total > 0 ? entry.bytes / total : 0;
    const bar = element("span", { class: "bar" });
    bar.style.width = `${Math.min(Math.max(share, 0), 1) * 100}%`;
    return element(
      "tr",
      {},
      element(
        "th",
        { scope: "row" },
        mark ? mark(name) : null,
        element("span", { class: "name", text: words(name), title: name }),
        element("span", { class: "track", "aria-hidden": "true" }, bar),
      ),
      element("td", {
        class: "number",
        text: formatBytes(entry.bytes),
        title: `${formatCount(entry.bytes)} bytes in ${formatCount(entry.count)} blocks`,
      }),
      element("td", { class: "number soft", text: formatShare(share) }),
    );
  });
  const head = element(
    "thead",
    {},
    element(
      "tr",
      {},
      element("td", {}),
      element("th", { scope: "col", class: "number", text: "bytes" }),
      element("th", { scope: "col", class: "number", text: "share" }),
    ),
  );
  const table = element("table", { class: "breakdown", "aria-label": title }, head, body);
  return element(
    "div",
    { class: "part" },
    element("div", { class: "title" }, element("h3", { text: title }), extra),
    note ? element("p", { class: "note", text: note }) : null,
    table,
    shortened(body, rows),
  );
}

// "model.layers.3.mlp" and its like of other numbers are one row.
function folded(entries) {
  const found = new Map();
  for (const [name, entry] of entries) {
    const key = name.replace(/(?<=[. ])\d+(?=\.|$)/g, "*");
    const sum = found.get(key) || { bytes: 0, count: 0, names: 0 };
    sum.bytes += entry.bytes;
    sum.count += entry.count;
    sum.names += 1;
    found.set(key, sum);
  }
  return [...found]
    .map(([key, sum]) => [sum.names > 1 ? `${key}  (${formatCount(sum.names)})` : key, sum])
    .sort((a, b) => b[1].bytes - a[1].bytes);
}
