// Tables that can be sorted by a column; long ones begin with their first rows.

// columns: [{name, of: row => value to sort by, show: row => text or node, number: true, class: "…", tip: "…"}, …]
function sortable(columns, rows, options = {}) {
  const first = options.first || 50;
  let order = rows.slice();
  let by = options.by === undefined ? null : options.by;
  let down = options.down !== false;
  let limit = first;
  const body = make("tbody");
  const heads = columns.map((column, index) =>
    make(
      "th",
      { class: column.number ? "num" : null, scope: "col" },
      make("button", { type: "button", "data-tip": column.tip, onclick: () => sort(index) }, column.name),
    ),
  );
  const more = make("button", {
    type: "button",
    onclick: () => {
      limit = Infinity;
      fill();
    },
  });
  const moreRow = make("p", {}, more);
  const table = make(
    "table",
    {},
    options.caption ? make("caption", {}, options.caption) : null,
    make("thead", {}, make("tr", {}, heads)),
    body,
  );

  function sort(index) {
    down = by === index ? !down : Boolean(columns[index].number);
    by = index;
    arrange();
  }

  function arrange() {
    if (by !== null) {
      const of = columns[by].of;
      const sign = down ? -1 : 1;
      order = rows.slice().sort((a, b) => sign * compare(of(a), of(b)));
    }
    heads.forEach((head, index) => {
      if (index === by) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    fill();
  }

  function fill() {
    body.replaceChildren(
      ...order.slice(0, limit).map((row) =>
        make(
          "tr",
          { class: options.rowClass ? options.rowClass(row) : null },
          columns.map((column) =>
            make(
              "td",
              { class: [column.number ? "num" : "", column.class || ""].join(" ").trim() || null },
              column.show ? column.show(row) : String(column.of(row)),
            ),
          ),
        ),
      ),
    );
    moreRow.hidden = order.length <= limit;
    more.textContent = `Show all ${order.length.toLocaleString("en")} rows`;
  }

  arrange();
  return make(
    "div",
    {},
    make(
      "div",
      {
        class: rows.length > 25 ? "scroll tall" : "scroll",
        tabindex: rows.length > 25 ? "0" : null,
        role: "region",
        "aria-label": options.label || options.caption || "table",
      },
      table,
    ),
    moreRow,
  );
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (a === null || a === undefined) return b === null || b === undefined ? 0 : -1;
  if (b === null || b === undefined) return 1;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}
