// What removing each head costs, against a measure of choice; a click opens the head.
const against = find("#against");

function drawWorth() {
  if (!against) return null;
  const measure = columnNamed[against.value];
  const cost = columnNamed[report.scatter.cost];
  const heads = cost.values.map((value, head) => head).filter((head) => cost.values[head] !== null && measure.values[head] !== null);
  const correlation = report.scatter.correlations[against.value];
  const known = correlation === null ? "no rank correlation" : `Spearman ${correlation.toFixed(2)}`;
  find("#worth-correlation").textContent = `${known} over ${heads.length} heads`;
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
  return draw(find("#worth-plot"), [points], layout);
}

function listenToWorth() {
  if (!against) return;
  against.addEventListener("change", drawWorth);
  find("#worth-plot").on("plotly_click", ({ points }) => followHeads([points[0].customdata]));
}
