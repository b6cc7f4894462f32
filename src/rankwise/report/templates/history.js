"use strict";
// Curves over the steps: one chart for each stack of the measure chosen, and those of the token states.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const choice = document.getElementById("measure");
  const escape = (text) => text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
  const number = (value) => (value === null ? "–" : String(Number(value.toPrecision(3))));

  function colour(at, of) {
    const part = of > 1 ? at / (of - 1) : 0;
    return `hsl(${260 - 200 * part}, 62%, ${40 + 12 * part}%)`;
  }

  function draw(chart, box) {
    const text = getComputedStyle(document.body).color;
    const axis = { color: text, gridcolor: "rgba(128,128,128,.25)", zeroline: false, automargin: true, fixedrange: true };
    const traces = chart.lines.map((line, at) => ({
      type: "scatter", mode: data.steps.length > 20 ? "lines" : "lines+markers", x: data.steps, y: line.values,
      name: `layer ${line.layer}`, line: { color: colour(at, chart.lines.length), width: 1.6 }, connectgaps: false,
      hoverinfo: "text", showlegend: chart.lines.length <= 12,
      text: line.values.map((value, i) => `${escape(data.names[i])}<br>layer ${line.layer}: ${number(value)}` +
        (line.spread[i] === null ? "" : ` ± ${number(line.spread[i])}`)),
    }));
    const name = chart.stack ? `${chart.title}, ${chart.stack}` : chart.title;
    const quantity = chart.quantity ? `<br><sup>${escape(chart.quantity)}</sup>` : "";
    const numbered = data.counted ? { tickvals: data.steps, ticktext: data.names.map((one) => escape(one.slice(-24))) } : {};
    const few = data.steps.length <= 12 ? numbered : { nticks: 8 };
    window.Plotly.newPlot(box, traces, {
      title: { text: escape(name) + quantity, font: { size: 14 } }, height: 340, margin: { l: 50, r: 10, t: 40, b: 44 },
      paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: text }, hovermode: "closest",
      xaxis: { ...axis, title: { text: data.counted ? "audit" : "step" }, ...few }, yaxis: axis,
      legend: { font: { size: 11 } },
    }, { displaylogo: false, responsive: true, displayModeBar: false });
  }

  function show(of, title) {
    const parent = document.getElementById(of);
    parent.querySelectorAll(".chart").forEach((box) => window.Plotly.purge(box));
    parent.replaceChildren();
    const chosen = data.charts.filter((chart) => chart.of === of && (title === null || chart.title === title));
    const boxes = chosen.map(() => Object.assign(document.createElement("div"), { className: "chart" }));
    parent.append(...boxes); // all of them before the first is drawn: a chart takes the width its box has then
    chosen.forEach((chart, at) => draw(chart, boxes[at]));
  }

  for (const title of new Set(data.charts.filter((chart) => chart.of === "heads").map((chart) => chart.title))) {
    choice.add(new Option(title, title));
  }
  const all = () => { if (choice.value) show("heads", choice.value); show("states", null); };
  choice.addEventListener("change", () => show("heads", choice.value));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  all();
})();
