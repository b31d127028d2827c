// The summary: the prediction, what limits it, and how to read the page.

function card(what, value, more, extra) {
  return make(
    "div",
    { class: "card" },
    make("div", { class: "what" }, what),
    make("div", { class: "value" }, value),
    extra || null,
    more ? make("div", { class: "more" }, more) : null,
  );
}

function meshText(shape, axes) {
  return shape.map((size, index) => `${axes[index]} = ${size}`).join(", ");
}

function summaryText() {
  const head = DATA.head;
  const on = `${count(head.devices, "device")}${head.device ? ` (${head.device})` : ""}`;
  const batches = head.micro_batches > 1 ? `, ${count(head.micro_batches, "micro-batch")}` : "";
  if (!head.pipeline) return `On one mesh of ${on}: ${meshText(head.mesh, head.axes)}${batches}.`;
  const schedule = head.schedule ? `, schedule ${head.schedule}${batches}` : "";
  return `A pipeline of ${count(DATA.stages.length, "stage")} on ${on}${schedule}.`;
}

function summaryCards() {
  const head = DATA.head;
  const cards = [];
  const step = head.step_s;
  const timed = step > 0;
  cards.push(
    card(
      "Predicted step",
      timed ? seconds(step) : "no estimate",
      head.rows ? `a batch of ${head.rows.toLocaleString("en")}` : null,
    ),
  );
  if (timed) {
    const rate = head.rows ? head.rows / step : 1 / step;
    cards.push(
      card(
        "Throughput",
        `${rate >= 100 ? Math.round(Number(rate.toPrecision(4))).toLocaleString("en") : digits(rate, 3)}\u00a0/\u00a0s`,
        head.rows ? "examples" : "steps",
      ),
    );
  }
  if (timed && head.model_rate) {
    const used = head.model_rate / head.peak_rate;
    const again =
      head.computed_rate > 1.02 * head.model_rate
        ? `; ${scaled(head.computed_rate, "FLOP/s")} with recomputation and redundant work`
        : "";
    cards.push(
      card(
        "Per device",
        scaled(head.model_rate, "FLOP/s"),
        `${percent(used)} of peak${again}`,
        meter(used, false),
      ),
    );
  }
  if (head.peak_bytes) {
    const share = head.budget_bytes ? head.peak_bytes / head.budget_bytes : null;
    cards.push(
      card(
        "Peak memory",
        bytes(head.peak_bytes),
        share === null
          ? "per device, no budget"
          : `${percent(share)} of the budget of ${bytes(head.budget_bytes)} per device`,
        share === null ? null : meter(share, true),
      ),
    );
  }
  cards.push(
    card(
      "Sent per device",
      bytes(head.communication_bytes),
      head.pipeline ? "per step, maximum over stages" : "per step",
    ),
  );
  if (head.pipeline && head.schedule)
    cards.push(
      card(
        "Pipeline bubble",
        percent(head.bubble),
        "of the step, average over devices",
        meter(head.bubble, false),
      ),
    );
  return make("div", { class: "cards" }, cards);
}

function meter(share, isLimit) {
  const full = isLimit && share > 0.95;
  return make(
    "div",
    { class: full ? "meter full" : "meter", role: "img", "aria-label": percent(share) },
    make("span", { style: `width:${Math.min(100, 100 * share)}%` }),
  );
}

const TERMS = [
  [
    "Mesh, axis",
    "Devices form a grid with named axes, such as x and y. An array is split along some axes and replicated along the others.",
  ],
  [
    "Spec",
    "How an array is sharded. P('x', None): the first dimension is split over axis x, the second is not split. P(): every device has a full copy.",
  ],
  [
    "Data parallel",
    "Devices along the axis have the same parameters and different examples; gradients are summed.",
  ],
  [
    "Tensor parallel, column or row",
    "A product with a parameter is split by its output features (column) or by its input features (row), which leaves partial sums.",
  ],
  [
    "Expert, sequence",
    "The axis splits the experts of a mixture, or a dimension of the activations other than the batch.",
  ],
  [
    "ZeRO",
    "Parameters or optimizer state are stored in shards along an axis and gathered for use.",
  ],
  [
    "Stage, micro-batch",
    "A pipeline splits the model into stages on separate meshes, and the batch into micro-batches that pass from stage to stage.",
  ],
  [
    "Collective",
    "Communication among the devices along an axis: all-reduce sums, all-gather collects shards, reduce-scatter sums and splits, all-to-all changes which dimension is split.",
  ],
  [
    "Predicted",
    "Numbers come from a cost model of the cluster, per step and device unless noted. Nothing was run; a recorded run appears as a timeline called measured.",
  ],
];

function summarySection() {
  const head = DATA.head;
  const node = make("section", { id: "summary", "aria-label": "Summary" });
  node.append(
    make("h1", {}, head.name),
    make("p", { class: "soft", style: "margin:0" }, summaryText()),
    summaryCards(),
  );
  if (head.limits.length) {
    node.append(
      make(
        "div",
        { class: "box" },
        make("h3", {}, "What limits the step"),
        make(
          "ul",
          {},
          head.limits.map((line) => make("li", {}, line)),
        ),
      ),
    );
  }
  if (head.warnings.length) {
    node.append(
      make(
        "div",
        { class: "box warn" },
        make("h3", {}, count(head.warnings.length, "warning")),
        make(
          "ul",
          {},
          head.warnings.map((line) => make("li", {}, line)),
        ),
      ),
    );
  }
  node.append(
    make(
      "details",
      {},
      make("summary", {}, "How to read this page"),
      make(
        "dl",
        { class: "terms" },
        TERMS.map(([term, words]) => [make("dt", {}, term), make("dd", {}, words)]),
      ),
    ),
  );
  node.append(
    make(
      "details",
      {},
      make("summary", {}, "How the plan was made"),
      facts([
        ["Method", make("code", {}, head.method)],
        [
          "Recomputed in the backward pass",
          head.remat || (DATA.stages.some((s) => s.remat) ? "layers of some stages" : "nothing"),
        ],
        [
          "Pinned",
          head.pinned.length ? head.pinned.map(([path, spec]) => `${path} as ${spec}`).join("; ") : "",
        ],
        ["Step before pinning", head.unpinned_step_s ? seconds(head.unpinned_step_s) : ""],
        ["JAX", head.jax],
        ["Program", head.program],
      ]),
    ),
  );
  return node;
}
