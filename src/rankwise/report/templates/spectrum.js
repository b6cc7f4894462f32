// Singular values of the head that is open, and of those that are kept beside it.
const spectraPlot = find("#spectra-plot");
const NO_VALUE = 65535;

function unpackedSpectra({ values, points }) {
  const starts = [0];
  for (const count of points) starts.push(starts.at(-1) + count);
  return { codes: new Uint16Array(bytesOf(values).buffer), points, starts };
}

const spectra = unpackedSpectra(report.spectra);
const freshSpectra = report.fresh_spectra ? unpackedSpectra(report.fresh_spectra) : null;
let kept = Array(SERIES).fill(null); // a head keeps its colour for as long as it is kept
let waiting = null; // a seventh one waits until another is let go

// Of N values the k-th stands at k/N, so that a rank stands where its share says.
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

// Where the curve passes the rank of the table, the mean over the sequences.
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
    marker: { symbol: "circle", size: 11, color: colour("raised"), line: { color: paint, width: 3 } },
  });
  return traces;
}

// The same head before training, behind its own.
function freshTrace(head) {
  if (!freshSpectra?.points[head]) return [];
  return [{
    type: "scatter", mode: "lines", name: "fresh weights", ...spectrumOf(head, freshSpectra), meta: { fresh: head },
    line: { color: colour("muted"), width: 5 }, opacity: 0.35, hovertemplate: "fresh weights<br>%{y:.3g} at %{x:.2f}<extra></extra>",
  }];
}

function drawSpectra() {
  if (open === null) return null;
  const others = kept.flatMap((head, slot) => (head === null || head === open ? [] : spectrumTraces(head, series(slot), DASHES[slot], 1.5)));
  const slot = kept.indexOf(open);
  const own = spectrumTraces(open, slot < 0 ? colour("text") : series(slot), "solid", 2.5);
  find("#spectra-status").textContent = spectra.points[open] ? "" : "No spectrum was kept of this head.";
  drawChips();
  return draw(spectraPlot, [...freshTrace(open), ...others, ...own], {
    height: 170, margin: { l: 60, r: 8, t: 6, b: 36 }, showlegend: false, dragmode: false, hovermode: "closest",
    xaxis: { title: { text: "i / min(T, S)" }, range: [0, 1.02], fixedrange: true, zeroline: false, automargin: true },
    yaxis: { title: { text: "σᵢ / σ₁", standoff: 8 }, tickfont: { size: 11 }, type: "log", fixedrange: true, exponentformat: "power", nticks: 5, automargin: true },
  });
}

function drawChips() {
  const chips = kept.flatMap((head, slot) => {
    if (head === null) return [];
    const button = element("button", { type: "button", className: `chip series-${slot}`, textContent: fullName(head), title: "Let this spectrum go" });
    button.setAttribute("aria-label", `Remove ${button.textContent}`);
    button.addEventListener("click", () => letGo(head));
    return [element("li", {}, button)];
  });
  find("#chips").replaceChildren(...chips);
  const keep = find("#keep");
  keep.disabled = kept.includes(open);
  keep.textContent = keep.disabled ? "Kept" : "Keep to compare";
  find("#ask").textContent = waiting === null ? "" : `Six spectra are kept. Choose the one that makes room for ${fullName(waiting)}.`;
}

function keepSpectrum(head) {
  if (kept.includes(head)) return null;
  if (kept.includes(null)) kept[kept.indexOf(null)] = head;
  else waiting = head;
  return drawSpectra();
}

function letGo(head) {
  kept = kept.map((other) => (other === head ? null : other));
  if (waiting !== null) {
    kept[kept.indexOf(null)] = waiting;
    waiting = null;
  }
  return drawSpectra();
}
