// Where time goes, collectives with their causes, and the plans that were considered.

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
      name: "Of the step",
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
    `Seconds of a device in one step of ${seconds(step)}, as the cost model counts them: forward, backward and update are computing alone.`,
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
    "Messages among devices, and why they are there: a sum was split (partial sums), an array is needed in another layout than it was made in, updated state returns to where it is kept (state), or neighbours' rows are read (windows).";
  if (!totals.length)
    return section(
      "collectives",
      "Collectives",
      "This plan has none inside of a mesh: devices compute without sending each other anything.",
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
      { name: "Cause", of: (row) => of(row, "cause"), tip: "why it is there", class: "array" },
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
    make("h3", {}, "Each, with its cause"),
    all,
  );
}

function arraysSection() {
  const rows = DATA.arrays;
  if (!rows.length) return null;
  return section(
    "arrays",
    "Arguments and results",
    "Where each array of the step lies. Paths that differ in numbers alone are one row; * stands for them.",
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
        ...(DATA.head.pipeline ? [{ name: "Stages", of: (row) => row.stages }] : []),
        { name: "Count", of: (row) => row.count, number: true },
        { name: "Each, per device", of: (row) => row.bytes, show: (row) => bytes(row.bytes), number: true },
      ],
      rows,
      { label: "Arguments and results", first: 40 },
    ),
  );
}

function triedTable(tried) {
  const compiled = tried.some((row) => row.compiled_s !== null);
  const found = (row) => (compiled ? row.compiled_s : row.measured_s);
  const text = (row) => {
    if (row.failure) return row.failure;
    return compiled ? seconds(found(row)) : `${seconds(found(row))} ± ${(100 * row.spread).toFixed(0)}%`;
  };
  return [
    make(
      "p",
      { class: "lead" },
      compiled
        ? "The best plans were compiled; the best by XLA's communication, of those that fit, was taken."
        : "The best plans were run with made-up inputs; the fastest that fits was taken.",
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
          name: "Memory, by XLA",
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
        { name: compiled ? "As compiled" : "Measured", of: found, show: text, number: true },
      ],
      tried,
      { by: 2, down: false, rowClass: (row) => (row.chosen ? "chosen" : null), label: "Plans that were run" },
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
        "Step times as the search's tables predict them; the best few are then solved exactly.",
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
        "Nothing else was searched: the method says how the step is run, and the solver chose the sharding.",
      ),
    );
  if (search && search.tried.length) node.append(...triedTable(search.tried));
  const gap =
    solver.gap === 0
      ? "proven optimal by the cost model"
      : `within ${(100 * solver.gap).toFixed(2)}% of the best possible by the cost model`;
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
      ["Seconds of planning", list(solver.seconds, seconds)],
      ...(search
        ? [
            [
              "Stage search",
              search.candidates
                ? `${search.candidates.toLocaleString("en")} ways to run layers priced, ${search.pruned.toLocaleString("en")} pruned, ${count(search.bounds, "bound")} tried`
                : null,
            ],
            ["Seconds of the search", list(search.seconds, seconds)],
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
