// The headline: what is predicted, what limits it, and how to read the rest.

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
      timed ? seconds(step) : "not priced",
      head.rows ? `a batch of ${head.rows.toLocaleString("en")}` : null,
    ),
  );
  if (timed) {
    const rate = head.rows ? head.rows / step : 1 / step;
    cards.push(
      card(
        "Throughput",
        `${rate >= 100 ? Math.round(Number(rate.toPrecision(4))).toLocaleString("en") : digits(rate, 3)}\u00a0/\u00a0s`,
        head.rows ? "examples of the batch" : "steps",
      ),
    );
  }
  if (timed && head.model_rate) {
    const used = head.model_rate / head.peak_rate;
    const again =
      head.computed_rate > 1.02 * head.model_rate
        ? `; ${scaled(head.computed_rate, "FLOP/s")} with repeated work counted`
        : "";
    cards.push(
      card(
        "Per device",
        scaled(head.model_rate, "FLOP/s"),
        `${percent(used)} of its peak${again}`,
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
          ? "per device; no budget was set"
          : `${percent(share)} of a device's budget of ${bytes(head.budget_bytes)}`,
        share === null ? null : meter(share, true),
      ),
    );
  }
  cards.push(
    card(
      "Sent by each device",
      bytes(head.communication_bytes),
      head.pipeline ? "per step, at most, within its stage" : "per step",
    ),
  );
  if (head.pipeline && head.schedule)
    cards.push(
      card(
        "Waiting",
        percent(head.bubble),
        "of the step a device does nothing, on average",
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
    "Devices are arranged in a grid. Its directions are axes with names, x and y; an array is split along some of them and copied along the others.",
  ],
  [
    "Spec",
    "How an array lies on the mesh. P('x', None) means: the first dimension is cut into as many parts as axis x has devices, the second is whole. P() is a full copy on every device.",
  ],
  [
    "Data parallel",
    "Devices along the axis compute with the same parameters on different examples; gradients are summed.",
  ],
  [
    "Tensor parallel, column or row",
    "A product with a parameter is split by its output features (column) or by the features that are summed over (row; then addends are summed).",
  ],
  [
    "Expert, sequence",
    "An axis splits the experts of a mixture, or another dimension of activations than the batch.",
  ],
  [
    "ZeRO",
    "Parameters or optimizer state are kept in parts along an axis on which they are needed whole, and gathered for use.",
  ],
  [
    "Stage, micro-batch",
    "A pipeline cuts the model into stages on devices of their own and the batch into micro-batches, which pass from stage to stage.",
  ],
  [
    "Collective",
    "A message among all devices along an axis: all-reduce sums, all-gather collects parts, reduce-scatter sums and keeps parts, all-to-all changes which dimension is split.",
  ],
  [
    "Predicted",
    "All figures come from a cost model of the cluster, for one step and one device, unless said otherwise. Nothing was run; where a run was recorded its timeline is called measured.",
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
          "Computed again in the backward pass",
          head.remat || (DATA.stages.some((s) => s.remat) ? "layers of some stages" : "nothing"),
        ],
        [
          "Pinned",
          head.pinned.length ? head.pinned.map(([path, spec]) => `${path} to ${spec}`).join("; ") : "",
        ],
        ["Step before pinning", head.unpinned_step_s ? seconds(head.unpinned_step_s) : ""],
        ["JAX", head.jax],
        ["Program", head.program],
      ]),
    ),
  );
  return node;
}
