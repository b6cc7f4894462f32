// Plots read their colors from the style sheet, so that they follow light and dark mode.
const report = JSON.parse(document.getElementById("report-data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 640px)");
const wide = matchMedia("(min-width: 1100px)"); // room for the card of a head next to the map; otherwise it is a sheet below
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const SERIES = 6;
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];

const find = (selector, within = document) => within.querySelector(selector);
const findAll = (selector, within = document) => [...within.querySelectorAll(selector)];
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const series = (number) => color(`series-${number % SERIES}`);

// Escapes a name, because Plotly interprets some HTML in texts.
const literal = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const withAlpha = (hex, alpha) => `rgba(${channels(hex).join(", ")}, ${alpha})`;

// The color of a scale at a share of its length.
function blend(steps, wanted) {
  const share = Math.min(Math.max(wanted, 0), 1); // a number may lie beyond the scale
  const after = Math.max(1, steps.findIndex(([at]) => at >= share));
  const [[from, start], [to, end]] = [steps[after - 1], steps[after]];
  const part = Math.min(Math.max((share - from) / (to - from), 0), 1);
  const last = channels(end);
  return channels(start).map((value, i) => value + part * (last[i] - value));
}

// Black or white, whichever stands out more: relative luminance and the 4.5:1 crossing of WCAG 2.
function inkOn(background) {
  const [red, green, blue] = background.map((value) => ((value / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#10151c" : "#ffffff";
}

function themed(layout, shapes = []) {
  const axis = { gridcolor: color("line"), linecolor: color("line"), tickfont: { color: color("muted") } };
  return {
    ...layout,
    shapes,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("muted") },
    hoverlabel: { bgcolor: color("raised"), bordercolor: color("line"), font: { family: getComputedStyle(document.body).fontFamily, color: color("text") }, align: "left" },
    xaxis: { ...layout.xaxis, ...axis },
    yaxis: { ...layout.yaxis, ...axis },
  };
}

function draw(place, data, layout, shapes) {
  return Plotly.react(place, data, themed(layout, shapes), { displayModeBar: false, responsive: true });
}

function scrollTo(element, block = "center") {
  element.scrollIntoView({ behavior: reducedMotion.matches ? "auto" : "smooth", block });
}

// Color scale from small to large values; neither end is good or bad.
const ramp = () => [0, 1, 2, 3, 4].map((step) => [step / 4, color(`scale-${step}`)]);
// Color scale for numbers with signs: two hues around 0.
const signedRamp = () => ["minus-2", "minus-1", "scale-0", "plus-1", "plus-2"].map((name, step) => [step / 4, color(name)]);

function element(tag, fields = {}, ...inside) {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...inside);
  return made;
}

const bytesOf = (base64) => Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));

const drawers = []; // functions that draw a part of the page
const starters = []; // functions that listen to the reader, called after the first drawing
