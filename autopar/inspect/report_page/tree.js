// The model tree on the page: opened by click or keys, searched by typing; only open rows are rendered.

const FIRST_CHILDREN = 100;
const FIRST_MATCHES = 20; // of one module
const MOST_MATCHES = 400;
const MOST_ROWS = 3000;

function treeSection() {
  const model = DATA.model;
  const tree = buildTree(model, DATA.texts);
  const total = tree.root.compute + tree.root.communication;
  const state = {
    open: new Set([""]),
    limits: new Map(),
    first: FIRST_CHILDREN,
    most: MOST_ROWS,
    hits: null,
    query: "",
    focus: "m",
    labels: tree.labels,
  };
  openFirst(tree.root, state);

  const body = make("tbody");
  const found = make("span", { class: "soft", role: "status", "aria-live": "polite" });
  const input = make("input", {
    type: "search",
    id: "search",
    placeholder: "Search modules, parameters, operators, specs …",
    "aria-label": "Search the model",
  });
  const heads = [
    ["Module, parameter or operator"],
    ["Parallelism"],
    ["Array and spec"],
    ["Compute", "seconds per device and step"],
    ["Communication", "seconds per device and step"],
    ["Sent", "bytes per device and step"],
    ["Share", "of all compute and communication"],
  ];
  const table = make(
    "table",
    { class: "tree", role: "treegrid", "aria-label": "Model tree" },
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        heads.map(([name, words], index) =>
          make(
            "th",
            { scope: "col", class: index >= 3 && index <= 5 ? "num" : null, "data-tip": words },
            name,
          ),
        ),
      ),
    ),
    body,
  );

  function render(keepFocus) {
    const rows = visibleRows(tree, model, state);
    if (!rows.some((row) => row.key === state.focus)) state.focus = rows[0].key;
    body.replaceChildren(...rows.map((row) => treeRow(row, model, total, state)));
    if (keepFocus) focusRow(state.focus);
  }

  function focusRow(key) {
    const row = [...body.rows].find((one) => one.dataset.key === key);
    if (!row) return;
    [...body.rows].forEach((one) => {
      one.tabIndex = -1;
    });
    row.tabIndex = 0;
    row.focus({ preventScroll: false });
    state.focus = key;
  }

  function toggle(path, want) {
    const opened = state.open.has(path);
    const node = tree.modules.get(path);
    if (want !== undefined ? want === opened : false) return;
    if (opened) state.open.delete(path);
    else state.open.add(path);
    if (opened && state.hits) state.hits.open.delete(node);
    render(true);
  }

  function activate(row) {
    state.focus = row.dataset.key;
    if (row.dataset.list) {
      state.limits.set(
        row.dataset.list,
        (state.limits.get(row.dataset.list) || FIRST_CHILDREN) + 5 * FIRST_CHILDREN,
      );
      render(true);
    } else if (row.dataset.path !== undefined && row.hasAttribute("aria-expanded")) {
      const open = row.getAttribute("aria-expanded") === "true";
      if (open && state.hits && !state.open.has(row.dataset.path)) {
        state.hits.open.delete(tree.modules.get(row.dataset.path));
        render(true);
      } else toggle(row.dataset.path);
    }
  }

  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row && !window.getSelection().toString()) activate(row);
  });
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    if (!row) return;
    const rows = [...body.rows];
    const at = rows.indexOf(row);
    const expanded = row.getAttribute("aria-expanded");
    const go = (index) => {
      if (rows[index]) focusRow(rows[index].dataset.key);
    };
    const parentAt = () => {
      let up = at;
      while (up > 0 && rows[up].getAttribute("aria-level") >= row.getAttribute("aria-level")) up -= 1;
      return up;
    };
    const keys = {
      ArrowDown: () => go(at + 1),
      ArrowUp: () => go(at - 1),
      Home: () => go(0),
      End: () => go(rows.length - 1),
      ArrowRight: () => (expanded === "false" ? activate(row) : go(at + 1)),
      ArrowLeft: () => (expanded === "true" ? activate(row) : go(parentAt())),
      Enter: () => activate(row),
      " ": () => activate(row),
    };
    if (keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
    }
  });

  let timer = 0;
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      state.query = input.value.trim();
      state.hits = state.query ? searchTree(tree, model, DATA.texts, state.query) : null;
      state.first = state.hits ? FIRST_MATCHES : FIRST_CHILDREN;
      state.most = state.hits ? MOST_MATCHES : MOST_ROWS;
      if (state.hits) {
        state.open.clear();
        state.limits.clear();
      } else openFirst(tree.root, state);
      found.textContent = state.hits
        ? `${count(state.hits.modules.size, "module")}, ${count(state.hits.params.size, "parameter")}, ${count(state.hits.numOps, "operator")} match`
        : "";
      render(false);
    }, 120);
  });

  render(false);
  return section(
    "model",
    "Model",
    `Your modules: ${count(tree.root.numOps, "operator")}, ${count(model.params.length, "parameter")}. Open a module to see inside it, by click or arrow keys. A module's parallelism is that of most of its FLOPs.${DATA.head.pipeline ? " Costs are per device of a stage, summed over stages." : ""}`,
    make(
      "div",
      { class: "tools" },
      input,
      make(
        "button",
        {
          type: "button",
          onclick: () => {
            state.open = new Set([""]);
            state.limits.clear();
            render(false);
          },
        },
        "Close all",
      ),
      found,
    ),
    legend([...WORD_COLOURS, ["other", 6]]),
    legend([
      ["compute", 0],
      ["communication", 3],
    ]),
    make("div", { class: "scroll tall" }, table),
  );
}

// Open what would otherwise be a single line, and the first level that has a choice.
function openFirst(root, state) {
  state.open = new Set([""]);
  let node = root;
  while (node.children.size === 1) {
    node = node.children.values().next().value;
    state.open.add(node.path);
  }
}
