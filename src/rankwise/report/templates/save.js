// Saves tables as CSV and figures as PNG, without any request to the network.
function download(name, blob) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

const fileName = (...parts) => parts.join("-").replace(/[^\p{L}\p{N}._-]+/gu, "-").slice(0, 120);

// A spreadsheet would run a text that begins like a formula: an apostrophe keeps it text. Numbers stay numbers.
function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const csv = (rows) => rows.map((row) => row.map(csvCell).join(",") + "\r\n").join("");
const saveCsv = (name, rows) => download(`${fileName(report.title, name)}.csv`, new Blob(["\ufeff", csv(rows)], { type: "text/csv" }));

async function savePng(plot, name) {
  const layout = { ...plot.layout, paper_bgcolor: color("raised"), plot_bgcolor: color("raised") };
  const size = { width: plot.clientWidth, height: plot.clientHeight, scale: 2, format: "png" };
  const image = await Plotly.toImage({ data: plot.data, layout }, size);
  download(`${fileName(report.title, name)}.png`, new Blob([bytesOf(image.split(",")[1])], { type: "image/png" }));
}

for (const plot of findAll("[data-png]")) {
  const button = element("button", { type: "button", className: "save", textContent: "PNG", title: "Save this figure as PNG" });
  button.addEventListener("click", () => savePng(plot, plot.dataset.png));
  plot.before(button);
}
