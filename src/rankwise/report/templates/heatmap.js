// One heat map for each panel, one scale for all; `marked` holds the heads a reader was led to.
const maps = findAll(".plot.heat");
const measurePicker = find("#measure");
const NUMERALS = ["①", "②", "③", "④", "⑤", "⑥"];
let marked = [];

const measured = () => columnNamed[measurePicker.value];
const scaleOf = (column) => column.ends.map(([end]) => end);

// Neighbours in a row share one outline.
function outlines(panel) {
  const places = marked.filter((head) => head in panel.places).map((head) => panel.places[head]);
  const runs = [];
  for (const [x, y] of places.sort((a, b) => a[1] - b[1] || a[0] - b[0])) {
    const last = runs.at(-1);
    if (last && last.y === y && last.to === x - 1) last.to = x;
    else runs.push({ y, from: x, to: x });
  }
  return runs.map(({ y, from, to }) => ({
    type: "rect", x0: from - 0.5, x1: to + 0.5, y0: y - 0.5, y1: y + 0.5, line: { color: colour("focus"), width: 3 },
  }));
}

// The numbers in the cells, dark or light as the cell demands; where cells are small only the missing ones.
function words(panel, column) {
  const steps = ramp();
  const [low, high] = scaleOf(column);
  const quiet = silent[column.name];
  const roomy = panel.numbers && !narrow.matches;
  const cells = Object.entries(panel.places).map(([head, place]) => [Number(head), place])
    .filter(([head]) => roomy || quiet.has(head) || column.values[head] === null);
  const ink = (head) => (quiet.has(head) || column.values[head] === null ? colour("muted")
    : inkOn(blend(steps, (column.values[head] - low) / (high - low))));
  return {
    type: "scatter", mode: "text", hoverinfo: "skip", textfont: { color: cells.map(([head]) => ink(head)) },
    x: cells.map(([, [x]]) => x), y: cells.map(([, [, y]]) => y),
    text: cells.map(([head]) => (quiet.has(head) ? "╱╱╱" : said(column, head))),
  };
}

function drawMap(number) {
  const panel = report.panels[number];
  const column = measured();
  const quiet = silent[column.name];
  const [zmin, zmax] = scaleOf(column);
  const of = (give) => panel.grid.map((row) => row.map((head) => (head === null ? null : give(head))));
  const heat = {
    type: "heatmap", customdata: panel.grid, hoverinfo: "text", hoverongaps: true, showscale: false, xgap: 2, ygap: 2,
    z: of((head) => (quiet.has(head) ? null : column.values[head])), zmin, zmax, colorscale: ramp(),
    hovertext: of((head) => `<b>${nameOf(head)}</b><br>${column.head} ${quiet.has(head) ? "says nothing of a diagonal" : said(column, head) + around(column, head)}`),
  };
  const greys = { ...heat, z: of((head) => (quiet.has(head) ? 1 : null)), hoverinfo: "skip", hoverongaps: false, colorscale: [[0, colour("sunken")], [1, colour("sunken")]] };
  const signs = panel.signs.map((sign) => ({
    ...sign,
    marker: { ...sign.marker, color: colour(sign.meta.severity), line: { color: colour("raised"), width: 1 } },
  }));
  maps[number].dataset.marked = marked.filter((head) => head in panel.places).join(" ");
  return draw(maps[number], [...(quiet.size ? [greys] : []), heat, words(panel, column), ...signs], panel.layout, outlines(panel));
}

// The scale, and on it what heads are held against, each with its number in the legend.
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
  find("#legend").replaceChildren(...column.references.map(({ name, note, said: words }, number) =>
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
  const { places } = report.panels[number];
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

// As a sheet it covers the lower part of the screen: the map goes to the top.
function choose(head) {
  const drawn = Promise.all([openHead(head), mark([head])]);
  if (!beside.matches) scrollTo(maps[panelOf(head)], "start");
  return drawn;
}
