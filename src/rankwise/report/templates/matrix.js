// The matrix of the open head on one sequence, with its tokens.
const matrixPlot = find("#matrix-plot");
const MOST_TICKS = 12;

// Means over blocks: what a row or column of the picture stands for.
function blockOf(at, cells, size, texts) {
  const from = Math.ceil((at * size) / cells), to = Math.ceil(((at + 1) * size) / cells) - 1;
  const text = texts ? texts.slice(from, to + 1).join(" ") : "";
  const place = from === to ? `${from}` : `${from}–${to}`;
  return { place, text: text.length > 60 ? `${text.slice(0, 57)}…` : text };
}

const named = ({ place, text }) => (text ? `${literal(text)} (${place})` : `token ${place}`);

async function unpacked(picture) {
  const stream = new Blob([bytesOf(picture.values)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function axis(cells, size, texts) {
  const step = Math.max(1, Math.ceil(cells / MOST_TICKS));
  const at = Array.from({ length: Math.ceil(cells / step) }, (_, i) => i * step);
  const tick = ({ place, text }) => literal(text ? (text.length > 8 ? `${text.slice(0, 7)}…` : text) : place);
  return { tickvals: at, ticktext: at.map((one) => tick(blockOf(one, cells, size, texts))) };
}

// Which columns get most of the weight, all rows together.
function heaviest(values, columns, blocks) {
  const sums = Array(columns).fill(0);
  values.forEach((row) => row.forEach((value, x) => { sums[x] += Math.abs(value ?? 0); }));
  const total = sums.reduce((sum, one) => sum + one, 0);
  if (!total) return "";
  const order = sums.map((sum, x) => [sum / total, x]).sort((a, b) => b[0] - a[0]).slice(0, 3);
  return `Most weight on ${order.map(([share, x]) => `${blocks[x].text || `token ${blocks[x].place}`} ${(100 * share).toFixed(0)} %`).join(", ")}.`;
}

let sequence = 0; // that was chosen last, for all heads

// A button for each sequence of which the head kept its matrix; none where there is one alone.
function drawSequences(pictures, shownPicture) {
  const buttons = pictures.map((picture) => {
    const words = `${nth[picture.sequence]} sequence`;
    const button = element("button", { type: "button", className: "button", textContent: words });
    button.setAttribute("aria-pressed", String(picture === shownPicture));
    button.addEventListener("click", () => { sequence = picture.sequence; drawMatrix(); });
    return button;
  });
  const focused = find("#matrix-sequences").contains(document.activeElement);
  find("#matrix-sequences").replaceChildren(...(buttons.length > 1 ? buttons : []));
  if (focused) find("#matrix-sequences [aria-pressed=true]")?.focus({ preventScroll: true });
}

const nth = ["First", "Second"];

async function drawMatrix() {
  const head = open;
  const pictures = report.pictures[head] ?? [];
  const picture = pictures.find((one) => one.sequence === sequence) ?? pictures[0];
  find("#matrix").hidden = !picture;
  find("#no-matrix").hidden = Boolean(picture);
  if (!picture) return null;
  drawSequences(pictures, picture);
  const { rows, columns, tokens, sources, largest, signed, steps: levels } = picture;
  const steps = await unpacked(picture);
  if (head !== open || (pictures.length > 1 && picture.sequence !== sequence)) return null; // another was chosen meanwhile
  const root = (code) => (code === 255 ? null : signed ? (2 * code) / levels - 1 : code / levels);
  const roots = Array.from({ length: rows }, (_, y) => Array.from(steps.subarray(y * columns, (y + 1) * columns), root));
  const values = roots.map((row) => row.map((one) => (one === null ? null : one * Math.abs(one) * largest)));
  const down = report.texts[picture.row_tokens], across = report.texts[picture.column_tokens];
  const rowBlocks = Array.from({ length: rows }, (_, y) => blockOf(y, rows, tokens, down));
  const columnBlocks = Array.from({ length: columns }, (_, x) => blockOf(x, columns, sources, across));
  const rowNames = rowBlocks.map(named), columnNames = columnBlocks.map(named);
  const hovertext = values.map((row, y) => row.map((value, x) => `row ${rowNames[y]}<br>column ${columnNames[x]}<br><b>≈ ${value === null ? "–" : Number(value.toPrecision(2))}</b>`));
  const averaged = rows < tokens || columns < sources;
  find("#matrix-note").textContent = `The ${nth[picture.sequence].toLowerCase()} sequence, ${tokens} × ${sources} tokens without padding`
    + `${averaged ? `, as means over blocks: ${rows} × ${columns}` : ""}. Rows read columns; colour by the square root of the weight, up to ${shown(largest, null)}.`;
  find("#matrix-peaks").textContent = heaviest(values, columns, columnBlocks);
  const width = matrixPlot.clientWidth || 380;
  const bare = { showgrid: false, zeroline: false, fixedrange: true, ticks: "", tickfont: { size: 10 } };
  return draw(matrixPlot, [{
    type: "heatmap", z: roots, hovertext, hoverinfo: "text", showscale: false, zmin: signed ? -1 : 0, zmax: 1,
    colorscale: signed ? signedRamp() : ramp(),
  }], {
    height: Math.min(Math.max((width - 80) * (rows / columns), 120), 360) + 80, showlegend: false, dragmode: false,
    margin: { l: 72, r: 8, t: 8, b: 72 },
    xaxis: { ...bare, ...axis(columns, sources, across), tickangle: -60 },
    yaxis: { ...bare, ...axis(rows, tokens, down), autorange: "reversed" },
  });
}
