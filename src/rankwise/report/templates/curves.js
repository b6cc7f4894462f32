// Curves of the token states through depth, and spectra of chosen heads.
const depthPlots = findAll(".depth .plot");
const spectraPlot = find("#spectra-plot");
const MOST_SPECTRA = SERIES;
let markedDepth = null;
let slots = Array(MOST_SPECTRA).fill(null); // a head keeps its colour for as long as it is drawn
let order = [];

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

function spectrumTraces(head, slot) {
  const { values, last } = report.spectra[head];
  const at = (i) => (values.length > 1 ? i / (values.length - 1) : 0);
  const name = report.names[head];
  const line = { color: series(slot), width: 2, dash: DASHES[slot] };
  const curve = {
    type: "scatter", mode: values.length > 1 ? "lines" : "markers", name, line, marker: { color: series(slot) },
    x: values.map((_, i) => at(i)), y: values, hovertemplate: `${name}<br>%{y:.3g}<extra></extra>`,
  };
  const ring = {
    type: "scatter", mode: "markers", hoverinfo: "skip", cliponaxis: false, x: [at(last)], y: [values[last]],
    marker: { symbol: "circle", size: 11, color: colour("raised"), line: { color: series(slot), width: 3 } },
  };
  return last === null ? [curve] : [curve, ring];
}

function drawSpectra() {
  if (!spectraPlot) return null;
  const drawn = slots.flatMap((head, slot) => (head === null ? [] : spectrumTraces(head, slot)));
  const empty = slots.filter((head) => head !== null && !report.spectra[head].values.length);
  find("#spectra-status").textContent = empty.map((head) => `${report.names[head]} has no spectrum.`).join(" ");
  drawChips();
  return draw(spectraPlot, drawn, {
    height: 340, margin: { l: 56, r: 8, t: 8, b: 48 }, showlegend: false, dragmode: false, hovermode: "closest",
    xaxis: { title: { text: "place: 0 largest, 1 smallest" }, range: [-0.01, 1.01],
      fixedrange: true, zeroline: false, automargin: true },
    yaxis: { title: { text: "σᵢ / σ₁" }, type: "log", fixedrange: true, exponentformat: "power", dtick: 1 },
  });
}

function drawChips() {
  const chips = slots.flatMap((head, slot) => {
    if (head === null) return [];
    const item = document.createElement("li");
    const button = document.createElement("button");
    const panel = report.panels.length > 1 ? `${report.panel_names[panelOf(head)]}, ` : "";
    button.type = "button";
    button.className = `chip series-${slot}`;
    button.textContent = `${panel}${report.names[head]}`;
    button.title = "Remove this spectrum";
    button.setAttribute("aria-label", `Remove ${button.textContent}`);
    button.addEventListener("click", () => removeSpectrum(head));
    item.append(button);
    return [item];
  });
  find("#chips").replaceChildren(...chips);
}

function addSpectrum(head) {
  if (slots.includes(head)) return;
  if (!slots.includes(null)) slots[slots.indexOf(order.shift())] = null;
  slots[slots.indexOf(null)] = head;
  order.push(head);
  drawSpectra();
}

function removeSpectrum(head) {
  slots = slots.map((other) => (other === head ? null : other));
  order = order.filter((other) => other !== head);
  drawSpectra();
}
