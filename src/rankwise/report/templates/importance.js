// What removing each head costs, against a measure of choice; a click opens the head.
const against = find("#against");

function drawImportance() {
  if (!against) return null;
  const measure = columnNamed[against.value];
  const cost = columnNamed[report.scatter.cost];
  const heads = cost.values.map((value, head) => head).filter((head) => cost.values[head] !== null && measure.values[head] !== null);
  const correlation = report.scatter.correlations[against.value];
  const known = correlation === null ? "no rank correlation" : `Spearman ${correlation.toFixed(2)}`;
  find("#importance-correlation").textContent = `${known} over ${heads.length} heads`;
  const points = {
    type: "scatter", mode: "markers", customdata: heads,
    x: heads.map((head) => measure.values[head]), y: heads.map((head) => cost.values[head]),
    hovertext: heads.map((head) => literal(`${fullName(head)}: ${measure.head.toLowerCase()} ${said(measure, head)}, cost ${said(cost, head)}`)),
    hoverinfo: "text", marker: { color: series(0), size: heads.length > 400 ? 4 : 8, opacity: 0.8 },
  };
  const layout = {
    height: 340, margin: { l: 64, r: 16, t: 8, b: 48 }, showlegend: false,
    xaxis: { title: { text: literal(measure.title) } }, yaxis: { title: { text: literal(report.scatter.axis) }, zeroline: true },
  };
  return draw(find("#importance-plot"), [points], layout);
}

function listenToImportance() {
  if (!against) return;
  against.addEventListener("change", drawImportance);
  find("#importance-plot").on("plotly_click", ({ points }) => followHeads([points[0].customdata]));
}
