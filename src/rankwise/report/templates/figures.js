// Figures of the page: Plotly dictionaries without colors, drawn in the colors of the style sheet.
const figurePlots = findAll("[data-figure]");
const AXIS = { zeroline: false, fixedrange: true, automargin: true };
const LAYOUT = {
  margin: { l: 48, r: 12, t: 12, b: 48 }, showlegend: false, dragmode: false, hovermode: "closest",
  legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
};

// A color for each part of an ordered set, from the first to the last.
const shadeOf = (part) => `hsl(${260 - 200 * part}, 62%, ${(dark.matches ? 62 : 40) + 12 * part}%)`;

function painted(trace) {
  const { scale, muted, shade, series: number, band, severity } = trace.meta ?? {};
  if (scale) return { ...trace, colorscale: scale === "signed" ? signedRamp() : ramp(), showscale: false };
  const own = severity ? color(severity) : muted ? color("muted") : shade === undefined ? series(number ?? 0) : shadeOf(shade);
  const filled = band === undefined ? {} : { fill: band ? "tonexty" : "none", fillcolor: withAlpha(own, 0.16) };
  return { ...trace, ...filled, line: { ...trace.line, color: own }, marker: { ...trace.marker, color: own } };
}

const marksOn = new Map(); // shapes that other scripts add to a figure

function drawFigure(plot) {
  const { data, layout } = report.figures[plot.dataset.figure];
  const whole = { ...LAYOUT, ...layout, xaxis: { ...AXIS, ...layout.xaxis }, yaxis: { ...AXIS, ...layout.yaxis } };
  const shapes = (marksOn.get(plot) ?? []).map((shape) => ({ ...shape, line: { ...shape.line, color: color("focus") } }));
  return draw(plot, data.map(painted), whole, shapes);
}

// Draws the figures that are visible; Plotly must release a plot before its box is hidden.
function drawFigures() {
  for (const picker of findAll(".choose")) {
    for (const figure of findAll("figure", picker.closest("section"))) {
      figure.hidden = figure.dataset.title !== picker.value;
      if (figure.hidden) Plotly.purge(find("[data-figure]", figure));
    }
  }
  return Promise.all(figurePlots.filter((plot) => !plot.closest("[hidden]")).map((plot) => drawFigure(plot)));
}

for (const picker of findAll(".choose")) picker.addEventListener("change", drawFigures);
drawers.push(drawFigures);
