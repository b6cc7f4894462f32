// Heads: numbers, heat maps, the card of the open head, and links from findings to heads.
const columnNamed = Object.fromEntries(report.columns.map((column) => [column.name, column]));
const drawn = report.columns.filter((column) => column.meaning);
const undefinedFor = Object.fromEntries(drawn.map((column) => [column.name, new Set(column.undefined_for)]));

function shown(value, digits) {
  if (value === null || value === undefined) return "–";
  if (digits === null) return Number.isInteger(value) || Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
  if (value !== 0 && Math.abs(value) < 0.5 * 10 ** -digits) return value.toExponential(0);
  return value.toFixed(digits);
}

const label = (column, head) => column.labels?.[head] ?? shown(column.values[head], column.digits);
const spreadLabel = (column, head) => {
  const spread = column.spread?.[head] ?? null;
  return spread === null ? "" : ` ± ${shown(spread, column.digits)}`;
};
const nameOf = (head) => `layer ${report.heads.layer[head]}, head ${report.heads.head[head]}`;
const gridOf = (head) => report.heads.grid[head];
const wordOf = (coded, head) => coded.words[coded.of[head]];
const fullName = (head) => (report.grids.length > 1 ? `${report.grids[gridOf(head)].title}, ` : "") + nameOf(head);

// One heat map per grid, one scale for all; `marked` holds the heads that a finding or a click leads to.
const maps = findAll(".plot.heat");
const measurePicker = find("#measure");
const NUMERALS = ["①", "②", "③", "④", "⑤", "⑥"];
let marked = [];
for (const grid of report.grids) { // column and row of each head
  grid.places = Object.fromEntries(grid.cells.flatMap((row, y) => row.flatMap((head, x) => (head === null ? [] : [[head, [x, y]]]))));
}

const measured = () => columnNamed[measurePicker.value];
const scaleOf = (column) => column.ends.map(([end]) => end);

// Neighbors in a row share one outline.
function outlines(grid) {
  const places = marked.filter((head) => head in grid.places).map((head) => grid.places[head]);
  const runs = [];
  for (const [x, y] of places.sort((a, b) => a[1] - b[1] || a[0] - b[0])) {
    const last = runs.at(-1);
    if (last && last.y === y && last.to === x - 1) last.to = x;
    else runs.push({ y, from: x, to: x });
  }
  return runs.map(({ y, from, to }) => ({
    type: "rect", x0: from - 0.5, x1: to + 0.5, y0: y - 0.5, y1: y + 0.5, line: { color: color("focus"), width: 3 },
  }));
}

// Numbers in the cells, dark on light cells and light on dark ones; in small cells, only signs of missing numbers.
function words(grid, column) {
  const steps = ramp();
  const [low, high] = scaleOf(column);
  const quiet = undefinedFor[column.name];
  const roomy = grid.numbers && !narrow.matches;
  const cells = Object.entries(grid.places).map(([head, place]) => [Number(head), place])
    .filter(([head]) => roomy || quiet.has(head) || column.values[head] === null);
  const ink = (head) => (quiet.has(head) || column.values[head] === null ? color("muted")
    : inkOn(blend(steps, (column.values[head] - low) / (high - low))));
  return {
    type: "scatter", mode: "text", hoverinfo: "skip", textfont: { color: cells.map(([head]) => ink(head)) },
    x: cells.map(([, [x]]) => x), y: cells.map(([, [, y]]) => y),
    text: cells.map(([head]) => (quiet.has(head) ? "╱╱╱" : label(column, head))),
  };
}

function drawMap(number) {
  const grid = report.grids[number];
  const column = measured();
  const quiet = undefinedFor[column.name];
  const [zmin, zmax] = scaleOf(column);
  const of = (give) => grid.cells.map((row) => row.map((head) => (head === null ? null : give(head))));
  const heat = {
    type: "heatmap", customdata: grid.cells, hoverinfo: "text", hoverongaps: true, showscale: false, xgap: 2, ygap: 2,
    z: of((head) => (quiet.has(head) ? null : column.values[head])), zmin, zmax, colorscale: ramp(),
    hovertext: of((head) => `<b>${nameOf(head)}</b><br>${column.short_title} ${quiet.has(head) ? "is not informative for a diagonal mixer" : label(column, head) + spreadLabel(column, head)}`),
  };
  const greys = { ...heat, z: of((head) => (quiet.has(head) ? 1 : null)), hoverinfo: "skip", hoverongaps: false, colorscale: [[0, color("sunken")], [1, color("sunken")]] };
  const signs = grid.signs.map((sign) => ({
    ...sign,
    marker: { ...sign.marker, color: color(sign.meta.severity), line: { color: color("raised"), width: 1 } },
  }));
  maps[number].dataset.marked = marked.filter((head) => head in grid.places).join(" ");
  return draw(maps[number], [...(quiet.size ? [greys] : []), heat, words(grid, column), ...signs], grid.layout, outlines(grid));
}

// The scale with its reference marks, each with its number in the legend.
function drawScale() {
  if (!maps.length) return;
  const column = measured();
  const [low, high] = scaleOf(column);
  const at = (value) => 100 * Math.min(Math.max((value - low) / (high - low), 0), 1);
  find(".ramp").style.background = `linear-gradient(to right, ${ramp().map(([place, step]) => `${step} ${100 * place}%`).join(", ")})`;
  const order = [...column.references.keys()].sort((a, b) => column.references[a].at - column.references[b].at);
  let last = -100, level = 0;
  const signs = order.map((number) => {
    const place = at(column.references[number].at);
    level = place - last < 6 ? level + 1 : 0;
    last = place;
    const sign = element("span", { className: "reference" }, element("span", { textContent: NUMERALS[number] }));
    sign.style.left = `${place}%`;
    sign.style.setProperty("--level", level);
    return sign;
  });
  find("#references").replaceChildren(...signs);
  find(".scale").classList.toggle("with-references", signs.length > 0);
  find("#legend").replaceChildren(...column.references.map(({ name, note, label: words }, number) =>
    element("li", {}, element("b", { textContent: `${NUMERALS[number]} ${name} ${words}` }), `: ${note}`)));
  const [[, lowWords], [, highWords]] = column.ends;
  const [beyond, largest] = column.beyond;
  find(".low").textContent = `${shown(low, column.digits)} ${lowWords}`;
  find(".high").textContent = `${shown(high, column.digits)} ${highWords}`
    + (beyond ? ` (${beyond} beyond, up to ${shown(largest, column.digits)})` : "");
}

function drawMaps() {
  drawScale();
  return Promise.all(maps.map((_, number) => drawMap(number)));
}

function mark(heads) {
  marked = heads;
  return drawMaps();
}

function listenToMap(map, number) {
  const { places } = report.grids[number];
  map.on("plotly_click", (event) => {
    const head = event.points[0].customdata;
    if (Number.isInteger(head)) choose(head);
  });
  map.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const from = marked.find((head) => head in places);
    if (event.key === "Enter" && from !== undefined) keepSpectrum(from);
    if (event.key === "Escape") closeHead();
    if (!step) return;
    event.preventDefault();
    const [x, y] = from === undefined ? [-step[0], -step[1]] : places[from];
    const to = Object.keys(places).find((head) => places[head][0] === x + step[0] && places[head][1] === y + step[1]);
    if (to !== undefined) choose(Number(to));
  });
}

// A sheet covers the lower part of the screen: the map moves to the top.
function choose(head) {
  const drawn = Promise.all([openHead(head), mark([head])]);
  if (!wide.matches) scrollTo(maps[gridOf(head)], "start");
  return drawn;
}

// The open head: a card next to the map, or a sheet below it.
const card = find("#head-card");
let open = null;

function findingsOf(head) {
  return report.targets.flatMap((target, index) => (target.section === "heads" && target.heads.includes(head) ? [index] : []));
}

function drawFindings(head) {
  const items = findingsOf(head).map((index) => {
    const [severity, code, meaning] = report.findings[index];
    const about = report.targets[index].about; // the sentence on a group speaks of one of its other heads
    return element("li", { className: severity }, element("a", { href: `#finding-${index}`, textContent: code }), about ? ` of ${about}` : ` ${meaning}`);
  });
  find("#head-findings").replaceChildren(...items);
}

// The cost of removing the head: in the unit of the loss and as a share, exact and estimated if known.
function drawCosts(head) {
  const costs = report.costs;
  if (!costs) return [];
  return [["exact", "Cost of removal, exact"], ["estimate", "Cost of removal, estimated"]]
    .filter(([how]) => costs[how][head] !== null)
    .map(([how, name]) => {
      const cost = costs[how][head];
      const share = costs.reference ? ` (${(100 * cost / costs.reference).toFixed(1)} % of ${costs.of})` : "";
      const caution = how === "estimate" ? "for the order of heads; can be far too low" : "";
      return element("div", { className: `wide${measurePicker?.value === "removal_cost" ? " chosen" : ""}` },
        element("dt", { textContent: name }),
        element("dd", {}, element("b", { textContent: shown(cost, 4) }), ` ${costs.unit.startsWith("of ") ? "" : costs.unit}${share}`, element("small", { textContent: caution })));
    });
}

function drawNumbers(head) {
  const rows = drawn.filter((column) => (column.name !== "removal_cost" || !report.costs) && column.values[head] !== null || column.labels?.[head]).map((column) => {
    const name = element("dt", { textContent: column.short_title });
    const value = element("dd", {}, element("b", { textContent: label(column, head) }), element("span", { className: "spread", textContent: spreadLabel(column, head) }));
    const initial = columnNamed[`init_${column.name}`];
    if (initial && initial.values[head] !== null) value.append(element("small", { textContent: `initially ${label(initial, head)}${spreadLabel(initial, head)}`, title: "The same head at initialization, mean ± standard deviation over seeds" }));
    if (undefinedFor[column.name].has(head)) value.replaceChildren(element("span", { textContent: "╱╱╱", title: "not informative for a diagonal mixer" }));
    const chosen = column.name === measurePicker?.value;
    return element("div", { className: chosen ? "chosen" : "" }, name, value);
  });
  const nearest = report.heads.nearest[head];
  if (nearest !== null) rows.push(element("div", {}, element("dt", { textContent: "Nearest head" }), element("dd", {}, element("b", { textContent: String(nearest) }))));
  rows.push(...drawCosts(head));
  find("#head-numbers").replaceChildren(...rows);
}

function drawFacts(head) {
  const { kind, mask, site, max_token: peak, tokens, sequences, nonfinite } = report.heads;
  const facts = [wordOf(kind, head), wordOf(kind, head) === "diagonal" ? "" : `${wordOf(mask, head)} mask`, `${shown(tokens[head], 0)} tokens`, `${sequences[head]} sequences`];
  if (nonfinite[head]) facts.push(`not finite in ${nonfinite[head]} of ${nonfinite[head] + sequences[head]} sequences`);
  const mass = drawn.find((column) => column.name === "max_token_mass")?.values[head];
  if (wordOf(peak, head)) facts.push(`${Math.round(100 * mass)} % of the weight on ${wordOf(peak, head)}`);
  find("#head-name").textContent = fullName(head);
  find("#head-facts").textContent = facts.filter(Boolean).join(" · ");
  find("#head-site").textContent = wordOf(site, head);
}

function openHead(head) {
  open = head;
  card.hidden = false;
  card.dataset.head = head;
  card.classList.add("opened");
  drawFacts(head);
  drawFindings(head);
  drawNumbers(head);
  return Promise.all([drawSpectra(), drawMatrix()]);
}

function closeHead() {
  card.classList.remove("opened");
  find(".plot.heat")?.focus({ preventScroll: true });
}

// Singular values of the open head, and of the heads that are kept to compare.
const spectraPlot = find("#spectra-plot");
const NO_VALUE = 65535;

function unpackedSpectra({ values, points }) {
  const starts = [0];
  for (const count of points) starts.push(starts.at(-1) + count);
  return { codes: new Uint16Array(bytesOf(values).buffer), points, starts };
}

const spectra = unpackedSpectra(report.spectra);
const initialSpectra = report.initial_spectra ? unpackedSpectra(report.initial_spectra) : null;
let kept = Array(SERIES).fill(null); // heads kept to compare, by their color

// The k-th of N singular values is drawn at k/N: so a rank is drawn at its share.
function spectrumOf(head, from = spectra) {
  const points = from.points[head];
  const whole = report.heads.full_rank[head] ?? points;
  const place = (at) => (1 + (points > 1 ? at / (points - 1) : 0) * (whole - 1)) / whole;
  const values = [...from.codes.subarray(from.starts[head], from.starts[head] + points)];
  return {
    x: values.map((_, at) => place(at)),
    y: values.map((code) => (code === NO_VALUE ? null : 10 ** ((-12 * code) / (NO_VALUE - 1)))),
  };
}

// The point of the curve at the rank share of the table, which is a mean over sequences.
function ringOf(head, { x, y }) {
  const share = columnNamed.numerical_rank.values[head];
  const after = x.findIndex((place) => place >= share - 1e-9);
  if (share === null || share <= 0 || after < 0 || y[after] === null) return null;
  if (after === 0) return { x: share, y: y[0] };
  const part = (share - x[after - 1]) / (x[after] - x[after - 1]);
  return { x: share, y: y[after - 1] * (y[after] / y[after - 1]) ** Math.min(part, 1) };
}

function spectrumTraces(head, paint, dash, width) {
  const curve = spectrumOf(head);
  const name = nameOf(head);
  const mode = curve.x.length > 1 ? "lines" : "markers";
  const traces = [{
    type: "scatter", mode, name, ...curve, line: { color: paint, width, dash }, marker: { color: paint },
    meta: { head }, hovertemplate: `${name}<br>%{y:.3g} at %{x:.2f}<extra></extra>`,
  }];
  const ring = ringOf(head, curve);
  if (ring) traces.push({
    type: "scatter", mode: "markers", hoverinfo: "skip", cliponaxis: false, x: [ring.x], y: [ring.y], meta: { ring: head },
    marker: { symbol: "circle", size: 11, color: color("raised"), line: { color: paint, width: 3 } },
  });
  return traces;
}

// The same head at initialization, behind its own curve.
function initialTrace(head) {
  if (!initialSpectra?.points[head]) return [];
  return [{
    type: "scatter", mode: "lines", name: "at initialization", ...spectrumOf(head, initialSpectra), meta: { initial: head },
    line: { color: color("muted"), width: 5 }, opacity: 0.35, hovertemplate: "at initialization<br>%{y:.3g} at %{x:.2f}<extra></extra>",
  }];
}

function drawSpectra() {
  if (open === null) return null;
  const others = kept.flatMap((head, slot) => (head === null || head === open ? [] : spectrumTraces(head, series(slot), DASHES[slot], 1.5)));
  const slot = kept.indexOf(open);
  const own = spectrumTraces(open, slot < 0 ? color("text") : series(slot), "solid", 2.5);
  find("#spectra-status").textContent = spectra.points[open] ? "" : "No spectrum was kept of this head.";
  drawChips();
  const traces = [...initialTrace(open), ...others, ...own];
  const least = Math.min(1, ...traces.flatMap((trace) => trace.y.filter((value) => value !== null)));
  const decades = Math.ceil(-Math.log10(least) / 4) || 1; // between two labels: digits between would overlap
  return draw(spectraPlot, traces, {
    height: 170, margin: { l: 60, r: 8, t: 6, b: 36 }, showlegend: false, dragmode: false, hovermode: "closest",
    xaxis: { title: { text: "i / min(T, S)" }, range: [0, 1.02], fixedrange: true, zeroline: false, automargin: true },
    yaxis: { title: { text: "σᵢ / σ₁", standoff: 8 }, tickfont: { size: 11 }, type: "log", fixedrange: true, exponentformat: "power", dtick: decades, automargin: true },
  });
}

function drawChips() {
  const chips = kept.flatMap((head, slot) => {
    if (head === null) return [];
    const button = element("button", { type: "button", className: `chip series-${slot}`, textContent: fullName(head), title: "Remove this spectrum" });
    button.setAttribute("aria-label", `Remove ${button.textContent}`);
    button.addEventListener("click", () => letGo(head));
    return [element("li", {}, button)];
  });
  find("#chips").replaceChildren(...chips);
  const keep = find("#keep");
  keep.disabled = kept.includes(open) || !kept.includes(null);
  keep.textContent = kept.includes(open) ? "Kept" : "Keep to compare";
}

function keepSpectrum(head) {
  if (kept.includes(head) || !kept.includes(null)) return null;
  kept[kept.indexOf(null)] = head;
  return drawSpectra();
}

function letGo(head) {
  kept = kept.map((other) => (other === head ? null : other));
  return drawSpectra();
}

// The attention map of the open head on one sequence, with its tokens.
const matrixPlot = find("#matrix-plot");
const MOST_TICKS = 12;

// The tokens of a row or column of the map, which can be the mean over a block of tokens.
function blockOf(at, cells, size, texts) {
  const from = Math.ceil((at * size) / cells), to = Math.ceil(((at + 1) * size) / cells) - 1;
  const text = texts ? texts.slice(from, to + 1).join(" ") : "";
  const place = from === to ? `${from}` : `${from}–${to}`;
  return { place, text: text.length > 60 ? `${text.slice(0, 57)}…` : text };
}

const named = ({ place, text }) => (text ? `${literal(text)} (${place})` : `token ${place}`);

async function unpacked(ownMap) {
  const stream = new Blob([bytesOf(ownMap.values)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function axis(cells, size, texts) {
  const step = Math.max(1, Math.ceil(cells / MOST_TICKS));
  const at = Array.from({ length: Math.ceil(cells / step) }, (_, i) => i * step);
  const tick = ({ place, text }) => literal(text ? (text.length > 8 ? `${text.slice(0, 7)}…` : text) : place);
  return { tickvals: at, ticktext: at.map((one) => tick(blockOf(one, cells, size, texts))) };
}

// The columns with most of the weight, summed over rows.
function heaviest(values, columns, blocks) {
  const sums = Array(columns).fill(0);
  values.forEach((row) => row.forEach((value, x) => { sums[x] += Math.abs(value ?? 0); }));
  const total = sums.reduce((sum, one) => sum + one, 0);
  if (!total) return "";
  const order = sums.map((sum, x) => [sum / total, x]).sort((a, b) => b[0] - a[0]).slice(0, 3);
  return `Most weight on ${order.map(([share, x]) => `${blocks[x].text || `token ${blocks[x].place}`} ${(100 * share).toFixed(0)} %`).join(", ")}.`;
}

async function drawMatrix() {
  const head = open;
  const ownMap = report.maps[head];
  find("#matrix").hidden = !ownMap;
  find("#no-matrix").hidden = Boolean(ownMap);
  if (!ownMap) return null;
  const { rows, columns, tokens, sources, largest, signed, steps: levels } = ownMap;
  const steps = await unpacked(ownMap);
  if (head !== open) return null; // another was chosen meanwhile
  const root = (code) => (code === 255 ? null : signed ? (2 * code) / levels - 1 : code / levels);
  const roots = Array.from({ length: rows }, (_, y) => Array.from(steps.subarray(y * columns, (y + 1) * columns), root));
  const values = roots.map((row) => row.map((one) => (one === null ? null : one * Math.abs(one) * largest)));
  const down = report.texts[ownMap.row_tokens], across = report.texts[ownMap.column_tokens];
  const rowBlocks = Array.from({ length: rows }, (_, y) => blockOf(y, rows, tokens, down));
  const columnBlocks = Array.from({ length: columns }, (_, x) => blockOf(x, columns, sources, across));
  const rowNames = rowBlocks.map(named), columnNames = columnBlocks.map(named);
  const hovertext = values.map((row, y) => row.map((value, x) => `row ${rowNames[y]}<br>column ${columnNames[x]}<br><b>≈ ${value === null ? "–" : Number(value.toPrecision(2))}</b>`));
  const averaged = rows < tokens || columns < sources;
  find("#matrix-note").textContent = `The first sequence, ${tokens} × ${sources} tokens without padding`
    + `${averaged ? `, as means over blocks: ${rows} × ${columns}` : ""}. Rows read columns; color by the square root of the weight, up to ${shown(largest, null)}.`;
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

function showMeasure(name) {
  if (name && columnNamed[name]?.meaning) measurePicker.value = name;
  for (const text of findAll("[data-meaning]")) text.hidden = text.dataset.meaning !== measurePicker.value;
  if (open !== null) drawNumbers(open);
  return mark(marked);
}

function followHeads(heads, measure) {
  marked = heads;
  const map = maps[gridOf(heads[0])];
  // The link leads to the grid and into the browser's history; in a tall grid, the cell must come into view too.
  const shownThen = Promise.all([openHead(heads[0]), showMeasure(measure)]);
  shownThen.then(() => setTimeout(() => {
    map.focus({ preventScroll: true });
    if (wide.matches) scrollTo(find(".shapelayer path", map));
    else scrollTo(map, "start");
  }));
}

function followStates({ stack, blocks }) {
  const line = { type: "line", x0: blocks, x1: blocks, y0: 0, y1: 1, yref: "paper", line: { width: 3 } };
  for (const plot of findAll("#states [data-figure]")) marksOn.set(plot, [line]);
  find("#states-status").textContent = `Marked: ${stack}, ${blocks === 0 ? "input" : `after ${blocks} ${blocks === 1 ? "block" : "blocks"}`}.`;
  return drawFigures();
}

function follow(event) {
  const link = event.target.closest("[data-finding], [data-head]");
  if (!link || link === card) return;
  const target = link.dataset.finding ? report.targets[link.dataset.finding] : { section: "heads", heads: [Number(link.dataset.head)] };
  for (const other of findAll("[aria-current]")) other.removeAttribute("aria-current");
  link.setAttribute("aria-current", "true");
  if (target.section === "heads") followHeads(target.heads, target.measure);
  if (target.section === "states") followStates(target);
}

if (maps.length) {
  const informative = drawn.find((column) => column.undefined_for.length < column.values.length);
  showMeasure((informative ?? drawn[0]).name);
}
if (report.opening !== null && wide.matches) {
  marked = [report.opening];
  openHead(report.opening);
}
drawers.push(drawMaps, drawSpectra, () => (open === null ? null : drawMatrix()));
starters.push(() => {
  maps.forEach(listenToMap);
  document.addEventListener("click", follow);
  measurePicker?.addEventListener("change", () => showMeasure());
  find("#keep")?.addEventListener("click", () => keepSpectrum(open));
  find("#close-head")?.addEventListener("click", closeHead);
});
