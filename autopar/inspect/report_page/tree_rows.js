// Rows of the model tree: modules, groups of equal layers, parameters, operators.

function marked(words, query) {
  const first = query ? query.split(/\s+/)[0].toLowerCase() : "";
  const at = first ? words.toLowerCase().indexOf(first) : -1;
  if (at < 0) return words;
  return [
    words.slice(0, at),
    make("mark", {}, words.slice(at, at + first.length)),
    words.slice(at + first.length),
  ];
}

function treeRow(row, model, total, state) {
  const cells = {
    module: moduleCells,
    group: groupCells,
    own: ownCells,
    op: opCells,
    param: paramCells,
    more: moreCells,
    cut: cutCells,
  }[row.kind](row, model, total, state);
  const tr = make(
    "tr",
    {
      class: row.kind,
      role: "row",
      "aria-level": row.level,
      tabindex: row.key === state.focus ? 0 : -1,
      "aria-expanded": row.open === null || row.open === undefined ? null : String(row.open),
    },
    cells.map(([content, style], index) =>
      make(
        "td",
        {
          role: "gridcell",
          class: style,
          style: index === 0 ? `padding-left:${6 + 16 * (row.level - 1)}px` : null,
        },
        content,
      ),
    ),
  );
  tr.dataset.key = row.key;
  if (row.kind === "module") tr.dataset.path = row.node.path;
  if (row.kind === "group" || row.kind === "own") tr.dataset.path = row.key;
  if (row.kind === "more") tr.dataset.list = row.list;
  return tr;
}

const nameCell = (sign, ...content) =>
  make(
    "div",
    { class: "name" },
    make("span", { class: "twist", "aria-hidden": "true" }, sign),
    make("span", {}, ...content),
  );
const timeCell = (value) => [value ? seconds(value) : "–", "num"];
const sentCell = (value) => [value ? bytes(value) : "–", "num"];
const shareCell = (compute, communication, total) => [
  total && compute + communication > 1e-3 * total
    ? stack(
        [
          ["compute", compute, 0],
          ["communication", communication, 3],
        ],
        total,
      )
    : "",
  "",
];

// Kinds of parallelism and their colours; the first that a text names counts.
const WORD_COLOURS = [
  ["ZeRO", 2],
  ["tensor", 1],
  ["expert", 4],
  ["sequence", 5],
  ["data", 0],
  ["replicated", 7],
];
const wordColour = (words) => (WORD_COLOURS.find(([name]) => words.includes(name)) || ["", 6])[1];

// `x: data, y: tensor, column` as one element per axis.
function wordCells(words, query, share) {
  const parts = words.split(/, (?=[^,:]+: )/).filter(Boolean);
  return parts.map((part, index) =>
    make(
      "span",
      { class: "axis" },
      make("i", { class: "swatch", style: `background:${colour(wordColour(part))}` }),
      marked(part, query),
      share && index === parts.length - 1 ? make("span", { class: "soft" }, ` ${share}`) : null,
    ),
  );
}

// Equal layers, with their costs added up.
function groupCells(row, model, total, state) {
  const { group } = row;
  const added = { ...group[0], name: `${group[0].name} … ${group[group.length - 1].name}` };
  for (const name of ["compute", "communication", "bytes", "held"])
    added[name] = sum(group.map((one) => one[name]));
  const tag = make("span", { class: "tag" }, `${group.length} equal`);
  return moduleCells({ node: added, open: row.open, tag }, model, total, state);
}

// Operators of a module that belong to none of its submodules.
function ownCells(row, model, total, state) {
  const where = row.node.path ? "outside these modules" : "outside all modules";
  const name = `${count(row.node.ops.length, "operator")} ${where}`;
  return moduleCells({ ...row, node: { ...row.node, name, stages: new Set() } }, model, total, {
    ...state,
    query: "",
  });
}

function moduleCells(row, model, total, state) {
  const { node } = row;
  const main = mainWords(node);
  const words = main ? wordCells(text(main.words), "", main.share < 0.995 ? percent(main.share) : "") : "";
  const stages =
    DATA.head.pipeline && node.stages.size
      ? make(
          "span",
          { class: "tag" },
          node.stages.size === 1 ? `stage ${[...node.stages][0]}` : `${node.stages.size} stages`,
        )
      : null;
  const held = node.held ? `${bytes(node.held)} of parameters` : "";
  return [
    [
      nameCell(
        row.open === null ? "" : row.open ? "▾" : "▸",
        marked(node.name || "(no name)", state.query),
        stages,
        row.tag,
      ),
      "",
    ],
    [words, "words"],
    [make("span", { class: "soft" }, held), "spec array"],
    timeCell(node.compute),
    timeCell(node.communication),
    sentCell(node.bytes),
    shareCell(node.compute, node.communication, total),
  ];
}

function opCells(row, model, total, state) {
  const [number, stage] = row.item;
  const costs = model.rows[number];
  const of = (column) => text(costs[column]);
  const runs = costs[ROW.runs] > 1 ? ` × ${costs[ROW.runs]}` : "";
  const about = [
    of(ROW.source),
    costs[ROW.flops] ? `${scaled(costs[ROW.flops], "FLOP")} per device` : "",
    DATA.head.pipeline ? `stage ${stage}` : "",
  ]
    .filter(Boolean)
    .join("\n");
  return [
    [
      nameCell(
        "·",
        make("span", { class: "opname code", "data-tip": about }, marked(of(ROW.name), state.query)),
        runs,
        make("span", { class: "tag" }, of(ROW.region) || "–"),
      ),
      "",
    ],
    [wordCells(of(ROW.words), state.query), "words"],
    [make("span", { class: "code" }, marked(`${of(ROW.array)} ${of(ROW.spec)}`, state.query)), "spec"],
    timeCell(costs[ROW.compute]),
    timeCell(costs[ROW.communication]),
    sentCell(costs[ROW.bytes]),
    shareCell(costs[ROW.compute], costs[ROW.communication], total),
  ];
}

function paramCells(row, model, total, state) {
  const param = model.params[row.item];
  const path = param[PARAM.path];
  return [
    [
      nameCell(
        "▪",
        make(
          "span",
          { class: "pname code", "data-tip": `${path}\n${text(param[PARAM.reason])}` },
          marked(state.labels[row.item], state.query),
        ),
        make("span", { class: "tag" }, "parameter"),
      ),
      "",
    ],
    [wordCells(text(param[PARAM.words]), state.query), "words"],
    [
      make(
        "span",
        { class: "code" },
        marked(`${text(param[PARAM.array])} ${text(param[PARAM.spec])}`, state.query),
      ),
      "spec",
    ],
    ["", "num"],
    ["", "num"],
    [make("span", { "data-tip": "stored on each device" }, `${bytes(param[PARAM.bytes])} stored`), "num"],
    ["", ""],
  ];
}

const blank = ["", ""];

function cutCells(row, model, total, state) {
  return [
    [
      state.hits ? "… more matches: type more of the name" : "… more rows: close some modules to see them",
      "soft",
    ],
    blank,
    blank,
    blank,
    blank,
    blank,
    blank,
  ];
}

function moreCells(row) {
  return [
    [`… ${row.left.toLocaleString("en")} more ${row.what}: click to show`, ""],
    blank,
    blank,
    blank,
    blank,
    blank,
    blank,
  ];
}
