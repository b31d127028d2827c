// Paints the part of the timelines that is on screen.

function paintTimeline(chart) {
  const { canvas, view, height } = chart;
  const width = canvas.clientWidth;
  if (!width) return;
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  const ink = {
    paper: named("--paper"),
    ink: named("--ink"),
    soft: named("--soft"),
    line: named("--line"),
    panel: named("--panel"),
  };
  const fills = Object.fromEntries(
    Object.entries(PHASE_COLOURS).map(([name, number]) => [name, named(`--c${number}`)]),
  );
  const onDark = named("--on-dark-fill");
  fills.on = (number) => (onColour(number).startsWith("var") ? onDark : onColour(number));
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.fillStyle = ink.paper;
  pen.fillRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const scale = plotWidth(chart) / (view.to - view.from);
  const xOf = (time) => LABEL_WIDTH + (time - view.from) * scale;

  pen.strokeStyle = ink.line;
  pen.fillStyle = ink.soft;
  pen.textAlign = "center";
  const unit = view.stretched ? view.length / 100 : 1; // round numbers of what the clock shows
  for (const tick of axisSteps(view.from / unit, view.to / unit, plotWidth(chart) / 110).map(
    (one) => one * unit,
  )) {
    const x = Math.round(xOf(tick)) + 0.5;
    pen.beginPath();
    pen.moveTo(x, AXIS_HEIGHT - 4);
    pen.lineTo(x, height);
    pen.stroke();
    if (x < width - 20) pen.fillText(clock(chart, tick), Math.max(x, LABEL_WIDTH), AXIS_HEIGHT / 2);
  }
  let top = AXIS_HEIGHT;
  for (const timeline of chart.timelines) {
    pen.fillStyle = ink.ink;
    pen.textAlign = "left";
    pen.font = "600 12px system-ui, sans-serif";
    pen.fillText(timeline.title, 6, top + TITLE_HEIGHT / 2);
    pen.font = "11px system-ui, sans-serif";
    top += TITLE_HEIGHT;
    timeline.meshes.forEach((mesh, number) => {
      if (number % 2 === 0) {
        pen.fillStyle = ink.panel;
        pen.globalAlpha = 0.6;
        pen.fillRect(0, top, width, chart.rowHeight);
        pen.globalAlpha = 1;
      }
      paintMesh(pen, chart, timeline, mesh, number, top, xOf, fills);
      pen.fillStyle = ink.soft;
      pen.textAlign = "left";
      if (number % Math.ceil(12 / chart.rowHeight) === 0)
        pen.fillText(DATA.head.pipeline ? `mesh ${number}` : "mesh", 6, top + chart.rowHeight / 2);
      top += chart.rowHeight;
    });
  }
  if (view.drag && !view.drag.pans) {
    pen.fillStyle = ink.soft;
    pen.globalAlpha = 0.25;
    pen.fillRect(Math.min(view.drag.from, view.drag.to), 0, Math.abs(view.drag.to - view.drag.from), height);
    pen.globalAlpha = 1;
  }
  chart.range.textContent = `${clock(chart, view.from)} to ${clock(chart, view.to)}`;
}

function paintMesh(pen, chart, timeline, mesh, number, top, xOf, fills) {
  const { view } = chart;
  const work = workHeight(chart);
  const thin = Math.max(2, chart.rowHeight - work - 2);
  const right = chart.canvas.clientWidth;
  const drawnTo = [-1, -1]; // per lane, the pixel up to which very short events are drawn already
  const factor = stretch(chart, timeline);
  pen.textAlign = "center";
  eachVisible(mesh, view.from / factor, view.to / factor, (index) => {
    const kind = timeline.kinds[mesh.kind[index]];
    const lane = chart.lanes === 2 && isTransfer(timeline, mesh.kind[index]) ? 1 : 0;
    const a = Math.max(LABEL_WIDTH, xOf(mesh.start[index] * factor));
    const b = Math.min(right, xOf(mesh.end[index] * factor));
    if (b < LABEL_WIDTH || (b - a < 1 && b <= drawnTo[lane])) return;
    const wide = Math.max(1, b - a - (b - a > 3 ? 1 : 0));
    drawnTo[lane] = Math.max(drawnTo[lane], Math.ceil(a + wide));
    const phase = phaseOf(text(kind[KIND.kind]), text(kind[KIND.phase]));
    pen.fillStyle = fills[phase];
    const y = lane ? top + work + 1 : top + 1;
    pen.fillRect(a, y, wide, lane ? thin : work - 1);
    if (!lane && wide > 16 && work >= 11) {
      const label =
        mesh.microBatch[index] >= 0
          ? String(mesh.microBatch[index])
          : (DATA.head.pipeline ? "" : text(kind[KIND.name]).split("/").pop()) ||
            text(kind[KIND.phase]) ||
            text(kind[KIND.kind]);
      if (pen.measureText(label).width < wide - 4) {
        pen.fillStyle = fills.on(PHASE_COLOURS[phase]);
        pen.fillText(label, (a + b) / 2, y + work / 2);
      }
    }
    const { hover } = view;
    if (hover && hover.timeline === timeline && hover.mesh === number && hover.index === index) {
      pen.strokeStyle = named("--ink");
      pen.lineWidth = 1.5;
      pen.strokeRect(a + 0.5, y + 0.5, Math.max(1, wide - 1), (lane ? thin : work - 1) - 1);
      pen.lineWidth = 1;
    }
  });
}
