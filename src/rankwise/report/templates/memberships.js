// Memberships of the tokens in the heads of one layer, chosen for each panel.
const membershipPlots = findAll(".plot.membership");
const layerPickers = findAll(".membership-layer");

function membershipWords(columns, x, y, share) {
  const width = columns + 1;
  const place = columns ? `head ${Math.floor(x / width)}, row ${y}, column ${x % width}` : `head ${y}, token ${x}`;
  return `${place}<br>Π ${share}`;
}

function drawMembership(number) {
  const map = report.memberships[number];
  const { columns, z } = map.layers[layerPickers[number].value];
  const hovertext = z.map((line, y) => line.map((share, x) => (share === null ? "" : membershipWords(columns, x, y, share))));
  const heat = { type: "heatmap", z, hovertext, hoverinfo: "text", zmin: 0, zmax: map.largest, colorscale: ramp(), showscale: false };
  const bare = { showgrid: false, zeroline: false, fixedrange: true, ticks: "" };
  const picture = columns > 0;
  return draw(membershipPlots[number], [heat], {
    height: picture ? 60 + Math.min(320, Math.max(80, (900 * z.length) / z[0].length)) : 72 + 22 * z.length,
    margin: { l: picture ? 8 : 44, r: 8, t: 8, b: picture ? 8 : 44 }, showlegend: false, dragmode: false,
    xaxis: picture ? { ...bare, visible: false } : { ...bare, title: { text: "token" } },
    yaxis: picture ? { ...bare, visible: false, autorange: "reversed", scaleanchor: "x" }
      : { ...bare, title: { text: "head" }, autorange: "reversed", tickformat: "d", nticks: 8 },
  });
}

const drawMemberships = () => Promise.all(membershipPlots.map((_, number) => drawMembership(number)));
layerPickers.forEach((picker, number) => picker.addEventListener("change", () => drawMembership(number)));
