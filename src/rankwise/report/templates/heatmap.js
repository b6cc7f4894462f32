// One heat map for each panel; `marked` holds the heads a reader was led to.
const maps = findAll(".plot.heat");
const measurePicker = find("#measure");
const HINT = find(".panel .status")?.textContent;
let marked = [];

const panelOf = (head) => report.panels.findIndex((panel) => head in panel.places);
const viewOf = (panel) => panel.views[measurePicker.value];

function stops(view) {
  const [worst, bad, none, good, best] = ["bad-2", "bad-1", "neutral", "good-1", "good-2"].map(colour);
  if (view.null !== null) {
    const middle = Math.min(Math.max((view.null - view.low) / (view.high - view.low), 0.01), 0.99);
    return [[0, worst], [middle / 2, bad], [middle, none], [(1 + middle) / 2, good], [1, best]];
  }
  const ramp = { low: [worst, bad, none], high: [none, bad, worst] }[view.bad] ?? [none, good, best];
  const places = { low: [0, 0.3, 1], high: [0, 0.7, 1] }[view.bad] ?? [0, 0.5, 1];
  return ramp.map((step, i) => [places[i], step]);
}

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
function words(panel, view) {
  const steps = stops(view);
  const roomy = panel.numbers && !narrow.matches;
  const cells = Object.values(panel.places).filter(([x, y]) => roomy || view.z[y][x] === null);
  const ink = ([x, y]) => {
    const z = view.z[y][x];
    return z === null ? colour("muted") : inkOn(blend(steps, (z - view.low) / (view.high - view.low)));
  };
  return {
    type: "scatter", mode: "text", hoverinfo: "skip", textfont: { color: cells.map(ink) },
    x: cells.map(([x]) => x), y: cells.map(([, y]) => y), text: cells.map(([x, y]) => view.text[y][x]),
  };
}

function drawMap(number) {
  const panel = report.panels[number];
  const view = viewOf(panel);
  const [cells, ...signs] = panel.data;
  const hovertext = cells.customdata.map((row, y) =>
    row.map((head, x) => (head === null ? "" : `<b>${report.names[head]}</b><br>${title()} ${view.text[y][x]}`)));
  const heat = { ...cells, hovertext, z: view.z, zmin: view.low, zmax: view.high, colorscale: stops(view) };
  const coloured = signs.map((sign) => ({
    ...sign,
    marker: { ...sign.marker, color: colour(sign.meta.severity), line: { color: colour("raised"), width: 1 } },
  }));
  maps[number].dataset.marked = markedIn(number).join(" ");
  drawScale(maps[number].closest(".panel"), view);
  return draw(maps[number], [heat, words(panel, view), ...coloured], panel.layout, outlines(panel));
}

function drawScale(figure, view) {
  const steps = stops(view).map(([at, step]) => `${step} ${100 * at}%`);
  find(".ramp", figure).style.background = `linear-gradient(to right, ${steps.join(", ")})`;
  find(".scale", figure).classList.toggle("with-null", view.null !== null);
  find(".null-mark", figure).style.left = `${(100 * (view.null - view.low)) / (view.high - view.low)}%`;
  find(".null-name", figure).textContent = view.difference ? "each head's own null" : `null ${view.nulls}`;
  const [low, high] = view.difference ? [`${view.ends[0].slice(1)} below`, `${view.ends[1]} above`] : view.ends;
  const option = measurePicker.selectedOptions[0];
  find(".low", figure).textContent = `${low} ${view.difference ? "" : option.dataset.low}`;
  find(".high", figure).textContent = `${high} ${view.difference ? "" : option.dataset.high}`;
}

const drawMaps = () => Promise.all(maps.map((_, number) => drawMap(number)));

const title = () => measurePicker.selectedOptions[0].textContent.toLowerCase();

function value(head) {
  const panel = report.panels[panelOf(head)];
  const [x, y] = panel.places[head];
  return `${title()} ${viewOf(panel).text[y][x]}`;
}

// Under its map: what was measured of one or two heads, or how many there are.
function tell(map, heads) {
  const status = find(".status", map.closest(".panel"));
  if (heads.length > 2) {
    status.textContent = `${heads.length} heads marked.`;
    return;
  }
  const lines = heads.map((head) => {
    const line = document.createElement("span");
    const name = document.createElement("strong");
    name.textContent = `${report.names[head]}: ${value(head)}`;
    line.append(name, ` · ${report.details[head]}`);
    return line;
  });
  status.replaceChildren(...(lines.length ? lines : [HINT]));
}

const markedIn = (number) => marked.filter((head) => head in report.panels[number].places);

function mark(heads) {
  marked = heads;
  maps.forEach((map, number) => tell(map, markedIn(number)));
  return drawMaps();
}

function listenToMap(map, number) {
  const { places } = report.panels[number];
  map.on("plotly_hover", (event) => {
    const head = event.points[0].customdata;
    if (Number.isInteger(head)) tell(map, [head]);
  });
  map.on("plotly_unhover", () => tell(map, markedIn(number)));
  map.on("plotly_click", (event) => {
    const head = event.points[0].customdata;
    if (Number.isInteger(head)) choose(head);
  });
  map.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const from = marked.find((head) => head in places);
    if (event.key === "Enter" && from !== undefined) choose(from);
    if (!step) return;
    event.preventDefault();
    const [x, y] = from === undefined ? [-step[0], -step[1]] : places[from];
    const to = Object.keys(places).find((head) => places[head][0] === x + step[0] && places[head][1] === y + step[1]);
    if (to !== undefined) mark([Number(to)]);
  });
}

function choose(head) {
  addSpectrum(head);
  return mark([head]);
}
