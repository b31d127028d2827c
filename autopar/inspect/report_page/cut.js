// A picture of an array cut over its mesh, and the pin that asks for the same cut.

const CUT_WIDTH = 58;
const CUT_HEIGHT = 34;
const MOST_PIECES = 16; // of a side; more are drawn as that many

// Pieces along a dimension: the product of the mesh axes that split it.
const piecesOf = (row, dimension) =>
  row.mesh.reduce((all, size, axis) => (row.layout[axis] === dimension ? all * size : all), 1);

function cutText(row) {
  const parts = row.shape
    .map((size, dimension) => [size, piecesOf(row, dimension), dimension])
    .filter(([, pieces]) => pieces > 1)
    .map(([size, pieces, dimension]) => `dimension ${dimension}: ${size} in ${pieces} parts of ${size / pieces}`);
  const devices = row.mesh.reduce((a, b) => a * b, 1);
  const shards = row.shape.reduce((all, _, dimension) => all * piecesOf(row, dimension), 1);
  const copies = devices / shards;
  const held = shards === 1 ? "every device has all of it" : `a device has 1/${shards} of it`;
  return [...parts, copies > 1 ? `${held}; ${copies} copies` : held].join("\n");
}

// The two dimensions that are cut most, the earlier one downwards; the first device's part is filled.
function cutPicture(row) {
  if (!row.shape.length) return make("span", { class: "soft" }, "scalar");
  const order = row.shape.map((_, dimension) => dimension);
  const shown = order
    .slice()
    .sort((a, b) => piecesOf(row, b) - piecesOf(row, a) || a - b)
    .slice(0, 2)
    .sort((a, b) => a - b);
  const [down, across] = shown.length === 2 ? shown : [null, shown[0]];
  const rows = down === null ? 1 : Math.min(MOST_PIECES, piecesOf(row, down));
  const columns = Math.min(MOST_PIECES, piecesOf(row, across));
  const height = down === null ? 12 : CUT_HEIGHT;
  const node = make("svg", {
    class: "cut",
    width: CUT_WIDTH,
    height,
    viewBox: `0 0 ${CUT_WIDTH} ${height}`,
    role: "img",
    "aria-label": cutText(row),
    "data-tip": cutText(row),
  });
  const width = (CUT_WIDTH - 1) / columns;
  const tall = (height - 1) / rows;
  for (let y = 0; y < rows; y += 1)
    for (let x = 0; x < columns; x += 1)
      node.append(
        make("rect", {
          x: 0.5 + x * width,
          y: 0.5 + y * tall,
          width,
          height: tall,
          class: x === 0 && y === 0 ? "own" : "other",
        }),
      );
  return node;
}

// `"state.params['w']": P('x', None),` as it is written into ShardingOptions(pins={…}).
function pinText(row) {
  const quote = row.path.includes('"') ? "'''" : '"';
  return `${quote}${row.path}${quote}: ${row.spec},`;
}

function pinButton(row) {
  const button = make(
    "button",
    {
      type: "button",
      class: "pin",
      "data-tip": `Copy ${pinText(row)}\nfor ShardingOptions(pins={…}) or plan.with_pins({…})`,
      onclick: () => {
        copyText(pinText(row)).then((copied) => {
          button.textContent = copied ? "copied" : "failed";
          setTimeout(() => {
            button.textContent = "copy pin";
          }, 1500);
        });
      },
    },
    "copy pin",
  );
  return button;
}

// A page opened from a file may have no clipboard: then a selection is copied.
function copyText(words) {
  if (navigator.clipboard && window.isSecureContext)
    return navigator.clipboard.writeText(words).then(
      () => true,
      () => copySelection(words),
    );
  return Promise.resolve(copySelection(words));
}

function copySelection(words) {
  const area = make("textarea", { style: "position:fixed;opacity:0" });
  area.value = words;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}
