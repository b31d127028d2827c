// Where the time goes, collectives with their causes, arrays, and the plans that were considered.

function breakdownSection() {
  const { parts, meshes, step_s: step } = DATA.breakdown;
  if (!step || !meshes.some((mesh) => sum(mesh.seconds) > 0)) return null;
  const present = parts
    .map((name, index) => [name, index])
    .filter(([, index]) => meshes.some((mesh) => mesh.seconds[index] > 0));
  const whole = Math.max(step, ...meshes.map((mesh) => sum(mesh.seconds)));
  const columns = [
    {
      name: DATA.head.pipeline ? "Stage" : "Mesh",
      of: (row) => row.stages,
      show: (row) => (DATA.head.pipeline ? row.stages : meshText(DATA.head.mesh, DATA.head.axes)),
    },
    {
      name: "Share of the step",
      of: (row) => sum(row.seconds),
      show: (row) =>
        stack(
          present.map(([name, index]) => [name, row.seconds[index], PART_COLOURS[name]]),
          whole,
          { large: true, unit: seconds },
        ),
      class: "wide",
    },
    ...present.map(([name, index]) => ({
      name: name[0].toUpperCase() + name.slice(1),
      of: (row) => row.seconds[index],
      show: (row) => `${seconds(row.seconds[index])}`,
      number: true,
    })),
  ];
  const table = sortable(columns, meshes, { label: "Time of a step", first: 100 });
  return section(
    "time",
    "Where the time goes",
    `Predicted seconds per device in a step of ${seconds(step)}. Forward, backward and update are compute only.`,
    legend(present.map(([name]) => [name, PART_COLOURS[name]])),
    table,
  );
}

const COLLECTIVE = {
  kind: 0,
  axes: 1,
  cause: 2,
  region: 3,
  before: 4,
  after: 5,
  module: 6,
  value: 7,
  producer: 8,
  consumer: 9,
  count: 10,
  bytes: 11,
  seconds: 12,
  places: 13,
  stages: 14,
};
const CAUSE_COLOURS = { "partial sums": 0, "other layout": 1, state: 2, windows: 4 };
const causeColour = (cause) => (cause in CAUSE_COLOURS ? CAUSE_COLOURS[cause] : 7);

function collectivesSection() {
  const { totals, rows } = DATA.collectives;
  const lead =
    "Communication between devices of a mesh, by cause: an operator splits a sum (partial sums), needs an array in another layout, or reads its neighbours' halos (windows), or updated state returns to its layout (state).";
  if (!totals.length)
    return section(
      "collectives",
      "Collectives",
      "This plan has no collectives: the devices of a mesh compute without communicating.",
    );
  const groups = new Map();
  totals.forEach(([kind, axes, cause, number, size, took]) => {
    const key = `${kind} along ${axes}`;
    if (!groups.has(key)) groups.set(key, { key, count: 0, bytes: 0, seconds: 0, causes: [] });
    const group = groups.get(key);
    group.count += number;
    group.bytes += size;
    group.seconds += took;
    group.causes.push([cause, took, causeColour(cause)]);
  });
  const bars = [...groups.values()].sort((a, b) => b.seconds - a.seconds);
  const most = Math.max(...bars.map((group) => group.seconds));
  const causes = [...new Set(totals.map(([, , cause]) => cause))];
  const pipeline = DATA.head.pipeline;
  const summary = sortable(
    [
      { name: "Kind and axis", of: (row) => row.key },
      {
        name: "Time, by cause",
        of: (row) => row.seconds,
        show: (row) => stack(row.causes, most, { large: true, unit: seconds }),
      },
      { name: "Seconds", of: (row) => row.seconds, show: (row) => seconds(row.seconds), number: true },
      { name: "Sent", of: (row) => row.bytes, show: (row) => bytes(row.bytes), number: true },
      {
        name: "Count",
        of: (row) => row.count,
        show: (row) => Number(row.count.toFixed(1)).toLocaleString("en"),
        number: true,
      },
    ],
    bars,
    {
      by: 2,
      label: "Collectives by kind and axis",
      caption: pipeline ? "Per device, on average over all devices" : null,
    },
  );
  const of = (row, column) => text(row[COLLECTIVE[column]]);
  const all = sortable(
    [
      {
        name: "Kind and axis",
        of: (row) => `${of(row, "kind")} along ${of(row, "axes")}`,
        show: (row) => [
          make("div", {}, of(row, "kind")),
          make("div", { class: "soft" }, `along ${of(row, "axes")}`),
        ],
        class: "array",
      },
      { name: "Cause", of: (row) => of(row, "cause"), tip: "why the collective is needed", class: "array" },
      {
        name: "What",
        of: (row) => of(row, "value"),
        show: (row) => [
          make("div", { class: "code" }, of(row, "value")),
          make("div", { class: "soft" }, `${of(row, "before")} → ${of(row, "after")}`),
        ],
        class: "wrap",
      },
      {
        name: "Between",
        of: (row) => of(row, "producer"),
        show: (row) => [
          make("div", {}, `from ${of(row, "producer") || "–"}`),
          make("div", {}, `to ${of(row, "consumer") || "–"}`),
        ],
        class: "wrap",
      },
      {
        name: "Region",
        of: (row) => of(row, "region"),
        show: (row) => [
          of(row, "region"),
          row[COLLECTIVE.places] > 1
            ? make("div", { class: "soft" }, `${row[COLLECTIVE.places]} places`)
            : null,
        ],
        class: "array",
      },
      ...(pipeline ? [{ name: "Stages", of: (row) => of(row, "stages") }] : []),
      { name: "Count", of: (row) => row[COLLECTIVE.count], number: true },
      {
        name: "Sent",
        of: (row) => row[COLLECTIVE.bytes],
        show: (row) => bytes(row[COLLECTIVE.bytes]),
        number: true,
      },
      {
        name: "Seconds",
        of: (row) => row[COLLECTIVE.seconds],
        show: (row) => seconds(row[COLLECTIVE.seconds]),
        number: true,
      },
    ],
    rows,
    { by: pipeline ? 8 : 7, label: "All collectives", first: 30 },
  );
  return section(
    "collectives",
    "Collectives",
    lead,
    legend(causes.map((cause) => [cause, causeColour(cause)])),
    summary,
    make("h3", {}, "All collectives"),
    all,
  );
}

function arraysSection() {
  const rows = DATA.arrays;
  if (!rows.length) return null;
  return section(
    "arrays",
    "Inputs and outputs",
    "How each array of the step is sharded. Paths that differ only in numbers share a row, with * for the numbers.",
    sortable(
      [
        {
          name: "Path",
          of: (row) => row.path,
          show: (row) => make("span", { class: "code" }, row.path),
          class: "wrap",
        },
        { name: "What", of: (row) => row.kind, class: "array" },
        {
          name: "Array",
          of: (row) => row.array,
          show: (row) => make("span", { class: "code" }, row.array),
          class: "array",
        },
        {
          name: "Spec",
          of: (row) => row.spec,
          show: (row) => make("span", { class: "code" }, row.spec),
          class: "array",
        },
        { name: "Cut", of: (row) => cutText(row), show: cutPicture, tip: "the first device's part is filled" },
        ...(DATA.head.pipeline ? [{ name: "Stages", of: (row) => row.stages }] : []),
        { name: "Count", of: (row) => row.count, number: true },
        { name: "Bytes per device", of: (row) => row.bytes, show: (row) => bytes(row.bytes), number: true },
        { name: "Pin", of: (row) => row.path, show: pinButton, tip: "for ShardingOptions(pins={…})" },
      ],
      rows,
      { label: "Inputs and outputs", first: 40 },
    ),
  );
}

function triedTable(tried) {
  const compiled = tried.some((row) => row.compiled_s !== null);
  const time = (row) => (compiled ? row.compiled_s : row.measured_s);
  const text = (row) => {
    if (row.failure) return row.failure;
    return compiled ? seconds(time(row)) : `${seconds(time(row))} ± ${(100 * row.spread).toFixed(0)}%`;
  };
  return [
    make(
      "p",
      { class: "lead" },
      compiled
        ? "The best plans were compiled, and their step times corrected by XLA's collectives; the fastest that fits was chosen."
        : "The best plans were timed with synthetic inputs; the fastest that fits was chosen.",
    ),
    sortable(
      [
        {
          name: "Plan",
          of: (row) => row.what,
          show: (row) => [row.what, row.chosen ? make("strong", {}, " (chosen)") : ""],
          class: "wrap",
        },
        {
          name: "Memory (XLA)",
          of: (row) => row.memory_bytes,
          show: (row) => (row.memory_bytes === null ? "–" : bytes(row.memory_bytes)),
          number: true,
        },
        {
          name: "Predicted",
          of: (row) => row.predicted_s,
          show: (row) => seconds(row.predicted_s),
          number: true,
        },
        { name: compiled ? "Corrected" : "Measured", of: time, show: text, number: true },
      ],
      tried,
      { by: 2, down: false, rowClass: (row) => (row.chosen ? "chosen" : null), label: "Plans that were tried" },
    ),
  ];
}

function searchSection() {
  const { search, solver } = DATA;
  const node = section("plans", "Plans considered", null);
  if (search && search.rows.length) {
    const slowest = Math.max(...search.rows.map((row) => row.step_s));
    node.append(
      make(
        "p",
        { class: "lead" },
        "Step times from the search's cost tables; the best few were then solved exactly.",
      ),
      sortable(
        [
          {
            name: "Plan",
            of: (row) => row.what,
            show: (row) => [row.what, row.chosen ? make("strong", {}, " (chosen)") : ""],
            class: "wrap",
          },
          { name: "Stages", of: (row) => row.stages, number: true },
          {
            name: "Micro-batches",
            of: (row) => row.micro_batches,
            show: (row) => (row.micro_batches === null ? "–" : String(row.micro_batches)),
            number: true,
          },
          {
            name: "Peak memory",
            of: (row) => row.peak_bytes,
            show: (row) => bytes(row.peak_bytes),
            number: true,
          },
          { name: "Step", of: (row) => row.step_s, show: (row) => seconds(row.step_s), number: true },
          {
            name: "Compared",
            of: (row) => row.step_s,
            show: (row) => stack([["step", row.step_s, row.chosen ? 2 : 7]], slowest, { unit: seconds }),
          },
        ],
        search.rows,
        { by: 4, down: false, rowClass: (row) => (row.chosen ? "chosen" : null), label: "Plans considered" },
      ),
    );
  } else if (!search || !search.tried.length)
    node.append(
      make(
        "p",
        { class: "lead" },
        "The method leaves no stages to search; the solver chose the sharding.",
      ),
    );
  if (search && search.tried.length) node.append(...triedTable(search.tried));
  const gap =
    solver.gap === 0
      ? "proven optimal under the cost model"
      : `within ${(100 * solver.gap).toFixed(2)}% of optimal under the cost model`;
  const list = (entries, show) =>
    Object.entries(entries)
      .map(([name, value]) => `${name} ${show(value)}`)
      .join(", ");
  node.append(
    facts([
      ["Sharding", solver.gap === null ? null : gap],
      [
        "Without a memory budget",
        solver.unbounded.length
          ? `objective ${solver.unbounded[0]} instead of ${solver.objective}, peak ${bytes(solver.unbounded[1])}`
          : null,
      ],
      ["Problem", list(solver.sizes, (value) => value.toLocaleString("en"))],
      ["Planning time", list(solver.seconds, seconds)],
      ...(search
        ? [
            [
              "Stage search",
              search.candidates
                ? `priced ${search.candidates.toLocaleString("en")} stage candidates, pruned ${search.pruned.toLocaleString("en")}, tried ${count(search.bounds, "bound")}`
                : null,
            ],
            ["Search time", list(search.seconds, seconds)],
            [
              "Solved exactly",
              search.checked
                .map(([tables, solved]) => `${seconds(solved)} (tables: ${seconds(tables)})`)
                .join(", "),
            ],
            ["Notes", search.notes.join(" ")],
          ]
        : []),
    ]),
  );
  return node;
}
