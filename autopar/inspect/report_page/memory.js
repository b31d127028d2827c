// Memory over time, by category, against the budget.

const MEMORY_COLOURS = [0, 5, 1, 2, 4, 3, 7];

function memorySection() {
  const memory = DATA.memory;
  if (!memory) return null;
  const known = DATA.stages.map((stage, number) => number).filter((number) => memory.of[number] !== null);
  const fullest = known.reduce(
    (best, number) => (DATA.stages[number].peak_bytes > DATA.stages[best].peak_bytes ? number : best),
    known[0],
  );
  const place = make("div", {});
  const choose = make(
    "select",
    { id: "memory-stage", "aria-label": "Stage", onchange: () => show(Number(choose.value)) },
    known.map((number) => make("option", { value: number, selected: number === fullest }, `stage ${number}`)),
  );
  const show = (number) => place.replaceChildren(...memoryView(number));
  show(fullest);
  const lead = DATA.head.pipeline
    ? "Bytes per device of a stage. The first chart follows the stage's program and includes activations of other micro-batches in flight; the second follows the predicted timeline of the whole step."
    : "Bytes per device during a step.";
  return section(
    "memory",
    "Memory",
    lead,
    DATA.head.pipeline
      ? [
          make("div", { class: "tools" }, make("label", { for: "memory-stage" }, "Show"), choose),
          place,
          make("h3", {}, "Peak of each stage"),
          peakTable(),
        ]
      : place,
  );
}

function memoryView(number) {
  const memory = DATA.memory;
  const chart = memory.charts[memory.of[number]];
  const held = chart.held.map((column) =>
    column.length === 1
      ? chart.seconds.map(() => column[0] * chart.unit)
      : column.map((value) => value * chart.unit),
  );
  const present = memory.categories
    .map((name, index) => [name, index])
    .filter(([, index]) => chart.at_peak[index] > 0 || held[index].some((value) => value > 0));
  const peak = sum(chart.at_peak);
  const rows = chart.largest.map(([what, module, category, size]) => ({
    what: text(what),
    module: text(module),
    category: text(category),
    size,
  }));
  return [
    legend(
      present.map(([name, index]) => [
        `${name}: ${bytes(chart.at_peak[index])} at the peak`,
        MEMORY_COLOURS[index],
      ]),
    ),
    make("div", { class: "chart" }, memoryChart(number, chart, held, present, peak)),
    stepMemory(number),
    rows.length ? make("h3", {}, "Largest arrays at the peak") : null,
    rows.length
      ? sortable(
          [
            {
              name: "What",
              of: (row) => row.what,
              show: (row) => make("span", { class: "code" }, row.what),
              class: "wrap",
            },
            { name: "Module", of: (row) => row.module, class: "wrap" },
            { name: "Category", of: (row) => row.category },
            { name: "Bytes", of: (row) => row.size, show: (row) => bytes(row.size), number: true },
            {
              name: "Share of peak",
              of: (row) => row.size,
              show: (row) => percent(row.size / peak),
              number: true,
            },
          ],
          rows,
          { by: 3, label: "Largest arrays at the peak", first: 12 },
        )
      : null,
  ]
    .flat()
    .filter(Boolean);
}

// For a pipeline: the mesh's bytes over the whole step, from the simulator.
function stepMemory(number) {
  const predicted = DATA.timelines.find((one) => one.title === "predicted");
  const line = DATA.head.pipeline && predicted && predicted.memory[DATA.stages[number].mesh];
  if (!line || line[0].length < 2) return null;
  const budget = DATA.stages[number].budget_bytes;
  const highest = Math.max(...line[1]);
  const shown = budget && budget < 3 * highest ? Math.max(budget, highest) : highest;
  const frame = chartFrame(
    220,
    1.06 * shown,
    predicted.step_s,
    `Memory over the whole step: at most ${bytes(highest)}${budget ? ` of a budget of ${bytes(budget)}` : ""}`,
  );
  const points = [];
  line[0].forEach((tick, index) => {
    const at = frame.x(tick * predicted.tick_s).toFixed(1);
    if (index) points.push(`${at} ${frame.y(line[1][index - 1]).toFixed(1)}`);
    points.push(`${at} ${frame.y(line[1][index]).toFixed(1)}`);
  });
  const end = frame.x(predicted.step_s).toFixed(1);
  points.push(
    `${end} ${frame.y(line[1][line[1].length - 1]).toFixed(1)}`,
    `${end} ${frame.y(0)}`,
    `${frame.x(0)} ${frame.y(0)}`,
  );
  frame.svg.append(make("path", { d: `M${points.join("L")}Z`, fill: colour(7) }));
  frame.limit(budget, shown);
  return [
    make("h3", {}, `Mesh ${DATA.stages[number].mesh} over the whole step`),
    make("div", { class: "chart" }, frame.svg),
  ];
}

// Axes of a chart of bytes over seconds.
function chartFrame(height, ceiling, last, label) {
  const width = Math.max(320, Math.min(1200, document.documentElement.clientWidth - 40));
  const [left, right, top, bottom] = [74, 14, 16, 28];
  const x = (time) => left + (time / last) * (width - left - right);
  const y = (value) => height - bottom - (value / ceiling) * (height - top - bottom);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (let line = 0; line <= 4; line += 1) {
    const value = (ceiling * line) / 4;
    svg.append(
      make("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      make("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, bytes(value)),
    );
  }
  axisSteps(0, last, width / 170).forEach((tick) =>
    svg.append(
      make(
        "text",
        { x: Math.min(x(tick), width - 30), y: height - 8, "text-anchor": "middle" },
        seconds(Number(tick.toPrecision(6))),
      ),
    ),
  );
  const limit = (budget, shown) => {
    if (budget && shown >= budget)
      svg.append(
        make("line", { class: "limit", x1: left, x2: width - right, y1: y(budget), y2: y(budget) }),
        make("text", { class: "limit-text", x: left + 6, y: y(budget) - 5 }, `budget ${bytes(budget)}`),
      );
    else if (budget)
      svg.append(
        make("text", { class: "limit-text", x: left + 6, y: top }, `budget ${bytes(budget)}, far above`),
      );
  };
  return { svg, x, y, width, height, bottom, limit };
}

function memoryChart(number, chart, held, present, peak) {
  const budget = DATA.stages[number].budget_bytes;
  const highest = Math.max(
    peak,
    ...chart.seconds.map((_, point) => sum(held.map((column) => column[point]))),
  );
  const shown = budget && budget < 3 * highest ? Math.max(budget, highest) : highest;
  const parts = present.map(([name, index]) => `${name} ${bytes(chart.at_peak[index])}`).join(", ");
  const label = `Memory over time: at most ${bytes(peak)} at ${seconds(chart.peak_s)}${budget ? ` of a budget of ${bytes(budget)}` : ""}; at the peak ${parts}`;
  const { svg, x, y, width, height, bottom, limit } = chartFrame(
    300,
    1.06 * shown || 1,
    chart.seconds[chart.seconds.length - 1] || 1,
    label,
  );
  const below = chart.seconds.map(() => 0);
  present.forEach(([name, index]) => {
    const lower = below.slice();
    held[index].forEach((value, point) => {
      below[point] += value;
    });
    const corners = (values) =>
      values.map((value, point) => `${x(chart.seconds[point]).toFixed(1)} ${y(value).toFixed(1)}`);
    svg.append(
      make("path", {
        d: `M${[...corners(below), ...corners(lower).reverse()].join("L")}Z`,
        fill: colour(MEMORY_COLOURS[index]),
        "data-tip": `${name}\n${bytes(chart.at_peak[index])} at the peak`,
      }),
    );
  });
  const turn = x(chart.peak_s) > width * 0.7;
  svg.append(
    make("line", {
      class: "peak",
      x1: x(chart.peak_s),
      x2: x(chart.peak_s),
      y1: y(peak) - 4,
      y2: height - bottom,
    }),
    make(
      "text",
      {
        class: "peak-text",
        x: x(chart.peak_s) + (turn ? -6 : 6),
        y: Math.max(12, y(peak) - 6),
        "text-anchor": turn ? "end" : "start",
      },
      `peak ${bytes(peak)}`,
    ),
  );
  limit(budget, shown);
  return svg;
}

function peakTable() {
  const rows = DATA.stages.map((stage, number) => ({ number, ...stage }));
  return sortable(
    [
      { name: "Stage", of: (row) => row.number },
      { name: "Peak", of: (row) => row.peak_bytes, show: (row) => bytes(row.peak_bytes), number: true },
      {
        name: "Budget",
        of: (row) => row.budget_bytes,
        show: (row) => (row.budget_bytes ? bytes(row.budget_bytes) : "none"),
        number: true,
      },
      {
        name: "Share of budget",
        of: (row) => (row.budget_bytes ? row.peak_bytes / row.budget_bytes : 0),
        show: (row) =>
          row.budget_bytes
            ? stack(
                [["peak", row.peak_bytes, row.peak_bytes > 0.95 * row.budget_bytes ? 3 : 0]],
                Math.max(row.peak_bytes, row.budget_bytes),
              )
            : "–",
      },
    ],
    rows,
    { label: "Peak memory of each stage", first: 100 },
  );
}
