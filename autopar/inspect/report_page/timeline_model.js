// Timelines as arrays by mesh, and what of them is on screen. Nothing here touches the page.

function readTimeline(data) {
  const [kind, microBatch, start, length] = data.events;
  const meshes = [];
  let at = 0;
  data.counts.forEach((size) => {
    const mesh = {
      kind: kind.slice(at, at + size),
      microBatch: microBatch.slice(at, at + size),
      start: new Float64Array(size),
      end: new Float64Array(size),
      longest: [0, 0],
    };
    let clock = 0;
    for (let index = 0; index < size; index += 1) {
      clock += start[at + index];
      mesh.start[index] = clock * data.tick_s;
      mesh.end[index] = (clock + length[at + index]) * data.tick_s;
      const lane = isTransfer(data, mesh.kind[index]) ? 1 : 0;
      mesh.longest[lane] = Math.max(mesh.longest[lane], mesh.end[index] - mesh.start[index]);
    }
    meshes.push(mesh);
    at += size;
  });
  return { ...data, meshes };
}

const KIND = { kind: 0, phase: 1, name: 2, stage: 3, bytes: 4 };
const isTransfer = (data, kind) => ["send", "recv", "transfer", "collective"].includes(text(data.kinds[kind][KIND.kind]));

// The first event of a mesh that starts at or after a time.
function firstFrom(mesh, time) {
  let low = 0;
  let high = mesh.start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (mesh.start[middle] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Events of a mesh that overlap [from, to), in order of their start.
function eachVisible(mesh, from, to, visit) {
  const longest = Math.max(...mesh.longest);
  for (
    let index = firstFrom(mesh, from - longest);
    index < mesh.start.length && mesh.start[index] < to;
    index += 1
  ) {
    if (mesh.end[index] >= from) visit(index);
  }
}

// The event at a time, in the lane (0: work, 1: transfers), within some slack for very short ones.
function eventAt(timeline, meshNumber, lane, time, slack) {
  const mesh = timeline.meshes[meshNumber];
  let best = -1;
  let distance = Infinity;
  eachVisible(mesh, time - slack, time + slack, (index) => {
    if (Number(isTransfer(timeline, mesh.kind[index])) !== lane) return;
    const away = Math.max(mesh.start[index] - time, time - mesh.end[index], 0);
    if (away < distance || (away === distance && mesh.start[index] > mesh.start[best])) {
      distance = away;
      best = index;
    }
  });
  return best;
}

// Round steps of a time axis.
function axisSteps(from, to, wanted) {
  const rough = (to - from) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const ticks = [];
  for (let tick = Math.ceil(from / step) * step; tick <= to + step * 1e-9; tick += step) ticks.push(tick);
  return ticks;
}
