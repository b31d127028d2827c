// The timeline: predicted, and measured below it on the same clock. Wheel, drag, buttons and keys zoom.

const AXIS_HEIGHT = 22;
const TITLE_HEIGHT = 20;
const LABEL_WIDTH = 62;

function timelineSection() {
  const timelines = DATA.timelines.map(readTimeline);
  if (!timelines.length) return null;
  const length = Math.max(...timelines.map((one) => one.length_s));
  const view = { from: 0, to: length, length, hover: null, drag: null, stretched: false };
  const most = Math.max(...timelines.map((one) => one.meshes.length));
  const lanes = timelines.some((one) => one.meshes.some((mesh) => mesh.longest[1] > 0)) ? 2 : 1;
  const rowHeight = Math.max(lanes === 2 ? 11 : 8, Math.min(40, Math.round(460 / (most * timelines.length))));
  const height = AXIS_HEIGHT + sum(timelines.map((one) => TITLE_HEIGHT + rowHeight * one.meshes.length)) + 4;
  const canvas = make("canvas", {
    tabindex: "0",
    role: "img",
    style: `height:${height}px`,
    "aria-label": timelineLabel(timelines),
  });
  const range = make("span", { class: "soft", id: "range", role: "status" });
  const chart = { timelines, view, rowHeight, lanes, canvas, height, range };

  let queued = false;
  const paint = () => {
    if (!queued) {
      queued = true;
      requestAnimationFrame(() => {
        queued = false;
        paintTimeline(chart);
      });
    }
  };
  chart.paint = paint;
  repaints.push(paint);
  new ResizeObserver(paint).observe(canvas);
  listenTimeline(chart);

  const button = (name, label, action) =>
    make("button", { type: "button", "aria-label": label, onclick: action }, name);
  const used = new Set();
  timelines.forEach((one) =>
    one.kinds.forEach((kind) => used.add(phaseOf(text(kind[KIND.kind]), text(kind[KIND.phase])))),
  );
  const measured = timelines.find((one) => one.title === "measured");
  const lead = DATA.head.pipeline
    ? "What each mesh does during a step. Numbers are micro-batches, thin bars sends and receives, gaps idle time."
    : "The layers of a step in order, and below them the collectives that they wait for.";
  return section(
    "timeline",
    "Timeline",
    lead,
    make(
      "div",
      { class: "tools" },
      button("+", "Zoom in", () => zoomBy(chart, 0.5)),
      button("−", "Zoom out", () => zoomBy(chart, 2)),
      button("Reset", "Show the whole step", () => setRange(chart, 0, length)),
      timelines.length > 1 ? stretchButton(chart) : null,
      range,
      make(
        "span",
        { class: "soft" },
        "Drag to zoom into a range. Click the chart, or hold Ctrl, to zoom with the wheel. Arrow keys pan.",
      ),
    ),
    legend(
      Object.keys(PHASE_COLOURS)
        .filter((name) => used.has(name))
        .map((name) => [name, PHASE_COLOURS[name]]),
    ),
    make("div", { class: "chart" }, canvas),
    timelines
      .filter((one) => one.left_out)
      .map((one) => make("p", { class: "soft" }, `${one.title}: ${one.left_out}`)),
    measured
      ? make(
          "p",
          {},
          `The measured step of ${seconds(measured.step_s)} takes ${digits(measured.step_s / DATA.head.step_s, 3)}× the predicted ${seconds(DATA.head.step_s)}.`,
        )
      : null,
    make("details", {}, make("summary", {}, "As a table"), timelineTable(timelines)),
  );
}

// Draws all timelines equally long, to compare their shapes; the clock is then in percent.
function stretchButton(chart) {
  const node = make("button", { type: "button", "aria-pressed": "false" }, "Equal lengths");
  node.addEventListener("click", () => {
    chart.view.stretched = !chart.view.stretched;
    node.setAttribute("aria-pressed", String(chart.view.stretched));
    chart.paint();
  });
  return node;
}

const stretch = (chart, timeline) => (chart.view.stretched ? chart.view.length / timeline.length_s : 1);
const clock = (chart, time) =>
  chart.view.stretched
    ? `${Number(((100 * time) / chart.view.length).toPrecision(4))}%`
    : seconds(Number(time.toPrecision(6)));

function timelineLabel(timelines) {
  return (
    timelines
      .map(
        (one) =>
          `${one.title} timeline of ${count(one.meshes.length, "mesh")}, ${seconds(one.step_s)} long, ${percent(one.bubble)} idle`,
      )
      .join("; ") + ". The table below has the values."
  );
}

function timelineTable(timelines) {
  const rows = timelines.flatMap((one) =>
    one.meshes.map((mesh, number) => ({
      title: one.title,
      number,
      events: mesh.start.length,
      busy: one.busy_s[number],
      waiting: Math.max(0, one.step_s - one.busy_s[number]),
      first: mesh.start.length ? mesh.start[0] : null,
      last: mesh.end.length ? mesh.end.reduce((a, b) => Math.max(a, b), 0) : null,
    })),
  );
  const time = (name, key) => ({
    name,
    of: (row) => row[key],
    show: (row) => seconds(row[key]),
    number: true,
  });
  return sortable(
    [
      { name: "Timeline", of: (row) => row.title },
      { name: "Mesh", of: (row) => row.number, number: true },
      { name: "Events", of: (row) => row.events, number: true },
      time("Busy", "busy"),
      time("Idle", "waiting"),
      time("First start", "first"),
      time("Last end", "last"),
    ],
    rows,
    { label: "Timelines by mesh", first: 128 },
  );
}

// -- the range on screen

function setRange(chart, from, to) {
  const { view } = chart;
  const least = view.length * 1e-6;
  let wide = Math.min(view.length, Math.max(least, to - from));
  let start = Math.max(0, Math.min(from, view.length - wide));
  if (!Number.isFinite(start) || !Number.isFinite(wide)) {
    start = 0;
    wide = view.length;
  }
  view.from = start;
  view.to = start + wide;
  chart.paint();
}

function zoomBy(chart, factor, at) {
  const { view } = chart;
  const middle = at === undefined ? (view.from + view.to) / 2 : at;
  setRange(chart, middle - (middle - view.from) * factor, middle + (view.to - middle) * factor);
}

const plotWidth = (chart) => Math.max(1, chart.canvas.clientWidth - LABEL_WIDTH);
const timeAt = (chart, x) =>
  chart.view.from + ((x - LABEL_WIDTH) / plotWidth(chart)) * (chart.view.to - chart.view.from);

function listenTimeline(chart) {
  const { canvas, view } = chart;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!(event.ctrlKey || event.metaKey || document.activeElement === canvas)) return;
      event.preventDefault();
      const width = view.to - view.from;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY))
        setRange(
          chart,
          view.from + (event.deltaX / plotWidth(chart)) * width,
          view.to + (event.deltaX / plotWidth(chart)) * width,
        );
      else
        zoomBy(
          chart,
          Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))),
          timeAt(chart, place(event)[0]),
        );
    },
    { passive: false },
  );
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.focus({ preventScroll: true });
    canvas.setPointerCapture(event.pointerId);
    const [x] = place(event);
    view.drag = { from: x, to: x, pans: event.shiftKey, start: view.from, width: view.to - view.from };
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (view.drag) {
      view.drag.to = x;
      if (view.drag.pans) {
        const moved = ((view.drag.from - x) / plotWidth(chart)) * view.drag.width;
        setRange(chart, view.drag.start + moved, view.drag.start + moved + view.drag.width);
      }
      hideTip();
    } else hoverTimeline(chart, x, y, event.clientX, event.clientY);
    chart.paint();
  });
  const drop = () => {
    const { drag } = view;
    view.drag = null;
    if (drag && !drag.pans && Math.abs(drag.to - drag.from) > 4) {
      const [a, b] = [
        timeAt(chart, Math.min(drag.from, drag.to)),
        timeAt(chart, Math.max(drag.from, drag.to)),
      ];
      setRange(chart, Math.max(view.from, a), Math.min(view.to, b));
    }
    chart.paint();
  };
  canvas.addEventListener("pointerup", drop);
  canvas.addEventListener("pointercancel", () => {
    view.drag = null;
    chart.paint();
  });
  canvas.addEventListener("pointerleave", () => {
    view.hover = null;
    hideTip();
    chart.paint();
  });
  canvas.addEventListener("dblclick", () => setRange(chart, 0, view.length));
  canvas.addEventListener("keydown", (event) => {
    const width = view.to - view.from;
    const keys = {
      ArrowLeft: () => setRange(chart, view.from - width / 5, view.to - width / 5),
      ArrowRight: () => setRange(chart, view.from + width / 5, view.to + width / 5),
      "+": () => zoomBy(chart, 0.5),
      "=": () => zoomBy(chart, 0.5),
      "-": () => zoomBy(chart, 2),
      0: () => setRange(chart, 0, view.length),
      Home: () => setRange(chart, 0, view.length),
    };
    if (keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
    }
  });
}

// Which timeline, mesh and lane a height is in.
function rowAt(chart, y) {
  let top = AXIS_HEIGHT;
  for (const timeline of chart.timelines) {
    top += TITLE_HEIGHT;
    const row = Math.floor((y - top) / chart.rowHeight);
    if (row >= 0 && row < timeline.meshes.length) {
      const inside = y - top - row * chart.rowHeight;
      return { timeline, mesh: row, lane: chart.lanes === 2 && inside > workHeight(chart) ? 1 : 0 };
    }
    top += chart.rowHeight * timeline.meshes.length;
  }
  return null;
}

const workHeight = (chart) => (chart.lanes === 2 ? Math.round(chart.rowHeight * 0.68) : chart.rowHeight - 2);

function hoverTimeline(chart, x, y, clientX, clientY) {
  chart.view.hover = null;
  const row = x > LABEL_WIDTH ? rowAt(chart, y) : null;
  if (!row) {
    hideTip();
    return;
  }
  const factor = stretch(chart, row.timeline);
  const slack = (3 * (chart.view.to - chart.view.from)) / plotWidth(chart) / factor;
  const index = eventAt(row.timeline, row.mesh, row.lane, timeAt(chart, x) / factor, slack);
  if (index < 0) {
    hideTip();
    return;
  }
  chart.view.hover = { ...row, index };
  showTip(eventWords(row.timeline, row.mesh, index), clientX, clientY);
}

function eventWords(timeline, meshNumber, index) {
  const mesh = timeline.meshes[meshNumber];
  const kind = timeline.kinds[mesh.kind[index]];
  const [what, phase, name] = [text(kind[KIND.kind]), text(kind[KIND.phase]), text(kind[KIND.name])];
  const lines = [name || phase || what];
  lines.push(`${timeline.title}: ${[what, phase].filter(Boolean).join(", ")}`);
  if (DATA.head.pipeline)
    lines.push(
      `mesh ${meshNumber}, stage ${kind[KIND.stage]}${mesh.microBatch[index] >= 0 ? `, micro-batch ${mesh.microBatch[index]}` : ""}`,
    );
  lines.push(
    `${seconds(mesh.start[index])} to ${seconds(mesh.end[index])}: ${seconds(mesh.end[index] - mesh.start[index])}`,
  );
  if (kind[KIND.bytes]) lines.push(`${bytes(kind[KIND.bytes])} sent`);
  return lines.join("\n");
}
