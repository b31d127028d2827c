// The model as a tree of the user's modules, with sums, and the search in it. Nothing here touches the page.

const ROW = {
  name: 0,
  region: 1,
  array: 2,
  spec: 3,
  words: 4,
  source: 5,
  runs: 6,
  flops: 7,
  compute: 8,
  communication: 9,
  bytes: 10,
};
const PARAM = { path: 0, module: 1, stage: 2, array: 3, spec: 4, words: 5, reason: 6, bytes: 7 };

function newModule(name, path, parent) {
  return {
    name,
    path,
    parent,
    children: new Map(),
    ops: [],
    params: [],
    compute: 0,
    communication: 0,
    bytes: 0,
    held: 0,
    numOps: 0,
    words: new Map(),
    stages: new Set(),
  };
}

function buildTree(model, texts) {
  const root = newModule("whole step", "", null);
  const modules = new Map([["", root]]);

  function find(path) {
    const known = modules.get(path);
    if (known) return known;
    const at = path.lastIndexOf("/");
    const parent = at < 0 ? root : find(path.slice(0, at));
    const node = newModule(path.slice(at + 1), path, parent);
    parent.children.set(node.name, node);
    modules.set(path, node);
    return node;
  }

  model.ops.forEach(([rows, places], stage) =>
    rows.forEach((row, index) => {
      const node = find(texts[places[index]]);
      const costs = model.rows[row];
      node.ops.push([row, stage]);
      node.compute += costs[ROW.compute];
      node.communication += costs[ROW.communication];
      node.bytes += costs[ROW.bytes];
      node.stages.add(stage);
      const weight = costs[ROW.flops] || 1e-3 * costs[ROW.compute];
      if (costs[ROW.words] !== undefined && texts[costs[ROW.words]])
        node.words.set(costs[ROW.words], (node.words.get(costs[ROW.words]) || 0) + weight);
    }),
  );
  model.params.forEach((param, index) => {
    const node = find(texts[param[PARAM.module]]);
    node.params.push(index);
    node.held += param[PARAM.bytes];
    node.stages.add(param[PARAM.stage]);
  });
  addUp(root);
  return { root, modules, labels: paramLabels(modules, model) };
}

// A parameter is called by its last key, or by its path where its module has several of that name.
function paramLabels(modules, model) {
  const labels = model.params.map((param) => {
    const key = param[PARAM.path].match(/\['([^']*)'\]$/);
    return key ? key[1] : param[PARAM.path];
  });
  for (const node of modules.values()) {
    const times = new Map();
    node.params.forEach((index) => times.set(labels[index], (times.get(labels[index]) || 0) + 1));
    const repeated = node.params.filter((index) => times.get(labels[index]) > 1);
    repeated.forEach((index) => {
      labels[index] = model.params[index][PARAM.path];
    });
  }
  return labels;
}

function addUp(node) {
  node.numOps = node.ops.length;
  node.own = { ...node, words: new Map(node.words), held: 0 }; // without its submodules
  for (const child of node.children.values()) {
    addUp(child);
    node.compute += child.compute;
    node.communication += child.communication;
    node.bytes += child.bytes;
    node.held += child.held;
    node.numOps += child.numOps;
    child.stages.forEach((stage) => node.stages.add(stage));
    child.words.forEach((weight, words) => node.words.set(words, (node.words.get(words) || 0) + weight));
  }
}

// The parallelism of most of a module's work, with its share.
function mainWords(node) {
  let best = null;
  let most = 0;
  let total = 0;
  node.words.forEach((weight, words) => {
    total += weight;
    if (weight > most) {
      most = weight;
      best = words;
    }
  });
  return best === null ? null : { words: best, share: total ? most / total : 1 };
}

// What matches: modules by their path; operators and parameters by what they are, together with their module's path.
// `open` has the modules above, so that every match can be seen.
function searchTree(tree, model, texts, query) {
  const wanted = query.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const about = model.rows.map((row) =>
    [ROW.name, ROW.region, ROW.array, ROW.spec, ROW.words, ROW.source]
      .map((column) => texts[row[column]])
      .join(" ")
      .toLowerCase(),
  );
  const known = new Map(); // words that a module's path leaves to its operators -> which rows have them
  const rowsWith = (words) => {
    const key = words.join(" ");
    if (!known.has(key))
      known.set(
        key,
        about.map((low) => words.every((word) => low.includes(word))),
      );
    return known.get(key);
  };
  const hits = { modules: new Set(), ops: new Map(), params: new Set(), open: new Set(), numOps: 0 };
  const openAbove = (node) => {
    for (let at = node; at && !hits.open.has(at); at = at.parent) hits.open.add(at);
  };
  for (const node of tree.modules.values()) {
    const path = node.path.toLowerCase();
    const left = wanted.filter((word) => !path.includes(word));
    if (!left.length && node.parent) {
      hits.modules.add(node);
      openAbove(node.parent);
    }
    const ops = left.length ? node.ops.filter(([row]) => rowsWith(left)[row]) : [];
    if (ops.length) {
      hits.ops.set(node, ops);
      hits.numOps += ops.length;
      openAbove(node);
    }
    for (const index of node.params) {
      const param = model.params[index];
      const words = [
        param[PARAM.path],
        texts[param[PARAM.array]],
        texts[param[PARAM.spec]],
        texts[param[PARAM.words]],
      ]
        .join(" ")
        .toLowerCase();
      if (wanted.every((word) => path.includes(word) || words.includes(word))) {
        hits.params.add(index);
        openAbove(node);
      }
    }
  }
  return hits;
}

const FEWEST_EQUAL = 6;

// Children in order, runs of equal layers as one group: [node] or [node, node, …].
function siblings(node) {
  const groups = [];
  for (const child of node.children.values()) {
    const last = groups[groups.length - 1];
    if (last && isEqual(last[0], child)) last.push(child);
    else groups.push([child]);
  }
  return groups.flatMap((group) => (group.length >= FEWEST_EQUAL ? [group] : group.map((one) => [one])));
}

function isEqual(one, other) {
  const close = (a, b) => Math.abs(a - b) <= 0.02 * Math.max(Math.abs(a), Math.abs(b));
  const places = (node) => [...node.stages].join();
  const words = (node) => {
    const main = mainWords(node);
    return main && main.words;
  };
  const pattern = (node) => node.name.replace(/\d+/g, "*");
  return (
    pattern(one) === pattern(other) &&
    one.numOps === other.numOps &&
    words(one) === words(other) &&
    places(one) === places(other) &&
    ["compute", "communication", "bytes", "held"].every((name) => close(one[name], other[name]))
  );
}

// The rows to show, in order: {kind, node | group | op | param, level, key}. Long lists begin with `limit(key)` entries.
function visibleRows(tree, model, state) {
  const rows = [];
  const { hits } = state;
  let cut = false;

  function visit(node, level) {
    if (rows.length >= state.most) {
      cut = true;
      return;
    }
    const inner = node.children.size + node.params.length + node.ops.length > 0;
    const open = hits ? hits.open.has(node) || state.open.has(node.path) : state.open.has(node.path);
    rows.push({ kind: "module", node, level, key: `m${node.path}`, open: inner ? open : null });
    if (!open) return;
    const whole = !hits || (!hits.open.has(node) && state.open.has(node.path)) || state.open.has(node.path);
    for (const group of hits ? [...node.children.values()].map((child) => [child]) : siblings(node)) {
      if (group.length > 1) visitGroup(group, level + 1);
      else if (whole || hits.modules.has(group[0]) || hits.open.has(group[0])) visit(group[0], level + 1);
    }
    listed(node, level, "param", whole ? node.params : node.params.filter((index) => hits.params.has(index)));
    if (whole && node.children.size && node.ops.length) {
      const key = `o${node.path}`;
      rows.push({ kind: "own", node: node.own, level: level + 1, key, open: state.open.has(key) });
      if (state.open.has(key)) listed(node, level + 1, "op", node.ops);
    } else listed(node, level, "op", whole ? node.ops : hits.ops.get(node) || []);
  }

  function visitGroup(group, level) {
    const key = `g${group[0].path}`;
    const open = state.open.has(key);
    rows.push({ kind: "group", group, level, key, open });
    if (open) group.forEach((child) => visit(child, level + 1));
  }

  function listed(node, level, kind, all) {
    const key = `${kind}${node.path}`;
    const limit = Math.min(state.limits.get(key) || state.first, Math.max(1, state.most - rows.length));
    all
      .slice(0, limit)
      .forEach((item, index) => rows.push({ kind, item, level: level + 1, key: `${key}#${index}` }));
    if (all.length > limit)
      rows.push({
        kind: "more",
        level: level + 1,
        key: `${key}+`,
        list: key,
        left: all.length - limit,
        what: kind === "op" ? "operators" : "parameters",
      });
  }

  visit(tree.root, 1);
  if (cut) rows.push({ kind: "cut", level: 1, key: "cut" });
  return rows;
}
