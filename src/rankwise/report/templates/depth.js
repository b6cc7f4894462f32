// Curves of the token states through depth.
const depthPlots = findAll(".depth .plot");
let markedDepth = null;

function drawDepth() {
  return Promise.all(report.depth.map((figure, number) => {
    const data = figure.data.map((trace) => ({
      ...trace,
      fillcolor: faded(series(trace.meta.series), 0.16),
      line: { ...trace.line, color: series(trace.meta.series) },
      marker: { ...trace.marker, color: series(trace.meta.series), size: figure.data[0].x.length > 16 ? 3 : 6 },
    }));
    const shapes = markedDepth === null ? [] : [{
      type: "line", x0: markedDepth, x1: markedDepth, y0: 0, y1: 1, yref: "paper",
      line: { color: colour("focus"), width: 3 },
    }];
    depthPlots[number].dataset.marked = markedDepth ?? "";
    return draw(depthPlots[number], data, figure.layout, shapes);
  }));
}
