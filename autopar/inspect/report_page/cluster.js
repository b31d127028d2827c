// The cluster: hosts and their devices, coloured by stage.

function clusterSection() {
  const { hosts, per_host: perHost, device, costs } = DATA.cluster;
  const total = Math.max(hosts * perHost, 1);
  const stageOf = stagesByDevice(total);
  const size = total <= 128 ? "l" : total <= 512 ? "m" : "s";
  const cellWidth = { l: 30, m: 16, s: 8 }[size];
  const columns = perHost <= 16 ? perHost : Math.ceil(Math.sqrt(perHost));
  const picture = make("div", {
    class: `hosts ${size}`,
    role: "img",
    "aria-label": clusterLabel(hosts, perHost),
    style: `grid-template-columns:repeat(auto-fill,minmax(min(100%,${columns * cellWidth + 12}px),1fr))`,
  });
  for (let host = 0; host < hosts; host += 1) {
    if (size === "s") {
      picture.append(hostCell(host, perHost, stageOf));
      continue;
    }
    const cells = make("div", { class: "cells", style: `grid-template-columns:repeat(${columns},1fr)` });
    for (let slot = 0; slot < perHost; slot += 1)
      cells.append(deviceCell(host * perHost + slot, host, stageOf));
    picture.append(make("div", { class: "host" }, make("div", { class: "label" }, `host ${host}`), cells));
  }
  const node = section(
    "cluster",
    "Cluster",
    device
      ? `${count(hosts, "host")} of ${count(perHost, "device")} (${device.name}). ${clusterHelp(size)}`
      : `A mesh of ${count(perHost, "device")}, without a description of the cluster.`,
    picture,
  );
  const used = DATA.head.devices;
  if (used < total)
    node.append(
      make(
        "p",
        { class: "soft" },
        `This plan does not use ${count(total - used, "device")} (hatched).`,
      ),
    );
  if (device) {
    node.append(
      facts([
        ["Inside a host", `${bytes(device.intra_host_bandwidth)}/s per device and direction`],
        ["Between hosts", hosts > 1 ? `${bytes(device.host_bandwidth)}/s per host and direction` : null],
        [
          "Memory",
          `${bytes(device.memory_bytes)} per device, ${bytes(device.memory_bandwidth)}/s bandwidth`,
        ],
        [
          "Peak rate",
          `${scaled(device.flops_16bit, "FLOP/s")} with 16-bit numbers, ${scaled(device.flops_32bit, "FLOP/s")} with 32-bit; large matrix products reach ${percent(device.efficiency)} of it`,
        ],
        ["Costs", costs || null],
      ]),
    );
  }
  if (DATA.head.pipeline) node.append(make("h3", {}, "Stages"), stageTable());
  return node;
}

function clusterHelp(size) {
  const stages = DATA.head.pipeline ? "Colours and numbers are stages. " : "";
  const repeat = DATA.head.pipeline && DATA.stages.length > NUM_COLOURS ? "Colours repeat. " : "";
  const bars = size === "s" ? "Each bar is a host. " : "";
  return `${bars}${stages}${repeat}Hover over ${size === "s" ? "one" : "a device"} for its mesh coordinates.`;
}

// device number -> [[stage, position in the stage's mesh], …]; stages of an interleaved schedule share devices.
function stagesByDevice(total) {
  const found = Array.from({ length: total }, () => []);
  DATA.stages.forEach((stage, number) => {
    let position = 0;
    for (const [from, to] of stage.devices) {
      for (let place = from; place < to; place += 1, position += 1)
        if (place < total) found[place].push([number, position]);
    }
  });
  return found;
}

function coordinates(position, shape, axes) {
  const parts = [];
  for (let axis = shape.length - 1; axis >= 0; axis -= 1) {
    parts.unshift(`${axes[axis]} = ${position % shape[axis]}`);
    position = Math.floor(position / shape[axis]);
  }
  return parts.join(", ");
}

function deviceCell(number, host, stageOf) {
  const held = stageOf[number];
  if (!held.length)
    return make("div", { class: "cell unused", "data-tip": `device ${number}, host ${host}\nunused` });
  const lines = held.map(([stage, position]) => {
    const { shape, axes } = DATA.stages[stage];
    return `${DATA.head.pipeline ? `stage ${stage}: ` : ""}${coordinates(position, shape, axes)}`;
  });
  const stages = held.map(([stage]) => stage);
  return make(
    "div",
    {
      class: "cell",
      style: `background:${colour(DATA.stages[stages[0]].mesh)};color:${onColour(DATA.stages[stages[0]].mesh)}`,
      "data-tip": `device ${number}, host ${host}\n${lines.join("\n")}`,
    },
    DATA.head.pipeline ? stages.join(",") : String(number),
  );
}

// A host of a large cluster as one bar, coloured along its devices.
function hostCell(host, perHost, stageOf) {
  const first = host * perHost;
  const parts = [];
  const lines = [];
  for (let slot = 0; slot < perHost;) {
    const held = stageOf[first + slot];
    const stage = held.length ? held[0][0] : null;
    let end = slot + 1;
    while (end < perHost && (stageOf[first + end].length ? stageOf[first + end][0][0] : null) === stage)
      end += 1;
    const fill = stage === null ? "var(--line)" : colour(DATA.stages[stage].mesh);
    parts.push(`${fill} ${(100 * slot) / perHost}% ${(100 * end) / perHost}%`);
    lines.push(stage === null ? "unused" : hostLine(held, stageOf[first + end - 1]));
    slot = end;
  }
  const attributes = {
    class: "host whole",
    style: `background:linear-gradient(to right,${parts.join(",")});color:${hostInk(stageOf[first])}`,
    "data-tip": `host ${host}, devices ${first} to ${first + perHost - 1}\n${lines.join("\n")}`,
  };
  return make("div", attributes, hostText(stageOf[first], host ? stageOf[first - perHost] : []));
}

const hostInk = (held) => (held.length ? onColour(DATA.stages[held[0][0]].mesh) : "inherit");

// Stages are named where they begin; colours repeat.
function hostText(held, before) {
  const stages = (entries) => entries.map(([stage]) => stage).join(",");
  return DATA.head.pipeline && stages(held) !== stages(before) ? stages(held) : "";
}

function hostLine(held, last) {
  const { shape, axes } = DATA.stages[held[0][0]];
  const which = DATA.head.pipeline ? `stage ${held.map(([stage]) => stage).join(", ")}: ` : "";
  return `${which}${coordinates(held[0][1], shape, axes)} to ${coordinates(last[0][1], shape, axes)}`;
}

function clusterLabel(hosts, perHost) {
  const parts = DATA.stages.map((stage, number) => `stage ${number} on devices ${stage.device_text}`);
  const where = DATA.head.pipeline
    ? parts.slice(0, 64).join("; ")
    : `one mesh on devices ${DATA.stages[0].device_text}`;
  return `${count(hosts, "host")} with ${count(perHost, "device")} each: ${where}`;
}

function stageTable() {
  const rows = DATA.stages.map((stage, number) => ({ ...stage, number }));
  const time = (name, tip) => ({
    name: name[0],
    of: (row) => row[name[1]],
    show: (row) => (row[name[1]] ? seconds(row[name[1]]) : "–"),
    number: true,
    tip,
  });
  const columns = [
    {
      name: "Stage",
      of: (row) => row.number,
      show: (row) => [
        make("span", { class: "swatch", style: `background:${colour(row.mesh)}` }),
        String(row.number),
      ],
    },
    { name: "Layers", of: (row) => row.layers, class: "wrap" },
    { name: "Devices", of: (row) => row.device_text, show: (row) => row.device_text },
    {
      name: "Mesh",
      of: (row) => row.shape.join("×"),
      show: (row) => meshText(row.shape, row.axes),
      class: "array",
    },
    time(["Forward", "forward_s"], "seconds per micro-batch"),
    time(["Backward", "backward_s"], "seconds per micro-batch"),
    time(["Per step", "once_s"], "the update and other work done once per step"),
    time(["Transfer", "transfer_s"], "transfers from neighbouring stages, per micro-batch"),
    { name: "Peak memory", of: (row) => row.peak_bytes, show: (row) => bytes(row.peak_bytes), number: true },
    ...(rows.some((row) => row.remat)
      ? [
          {
            name: "Recomputed",
            of: (row) => (row.remat ? "yes" : "no"),
            tip: "the backward pass recomputes its layers",
          },
        ]
      : []),
  ];
  return sortable(columns, rows, { label: "Stages", first: 100 });
}
