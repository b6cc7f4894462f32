// What a reader does: follow a finding, choose a measure, sort the table, turn the lights off.
function showMeasure(name) {
  if (name) measurePicker.value = name;
  for (const text of findAll("[data-meaning]")) text.hidden = text.dataset.meaning !== measurePicker.value;
  return mark(marked);
}

function followHeads(heads, measure) {
  for (const head of heads.slice(0, 2).reverse()) if (heads.length < 3) addSpectrum(head);
  marked = heads;
  const map = maps[panelOf(heads[0])];
  // The link itself leads to the panel and into the browser's history; a tall panel needs the way to the cell too.
  showMeasure(measure).then(() => setTimeout(() => {
    map.focus({ preventScroll: true });
    scrollTo(find(".shapelayer path", map));
  }));
}

function followStates({ stack, layer }) {
  markedDepth = layer;
  drawDepth();
  const status = find("#depth-status");
  status.hidden = false;
  status.textContent = `Marked: ${stack}, ${layer === 0 ? "input" : `after block ${layer}`}.`;
}

function follow(event) {
  const link = event.target.closest("[data-finding], [data-head]");
  if (!link) return;
  const target = link.dataset.finding ? report.targets[link.dataset.finding] : { section: "heads", heads: [Number(link.dataset.head)] };
  for (const other of findAll("[aria-current]")) other.removeAttribute("aria-current");
  link.setAttribute("aria-current", "true");
  if (target.section === "heads") followHeads(target.heads, target.measure);
  if (target.section === "states") followStates(target);
}

const cellValue = (row, column) => {
  const cell = row.cells[column];
  if (cell.dataset.value === undefined) return cell.textContent;
  return cell.dataset.value === "" ? null : Number(cell.dataset.value);
};

// What has no number comes last, whichever way the rest is sorted.
function compare(a, b, direction) {
  if (a === null || b === null) return (a === null) - (b === null);
  return direction * (typeof a === "string" ? a.localeCompare(b) : a - b);
}

function sortBy(header) {
  const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
  const body = header.closest("table").tBodies[0];
  const keyed = [...body.rows].map((row) => [cellValue(row, header.cellIndex), row]);
  keyed.sort(([a], [b]) => compare(a, b, direction));
  body.replaceChildren(...keyed.map(([, row]) => row));
}

async function drawAll() {
  await Promise.all([drawMaps(), drawDepth(), drawSpectra(), drawMemberships()]);
}

slots = slots.map((_, slot) => report.opening[slot] ?? null);
order = [...report.opening];
await drawAll();
maps.forEach(listenToMap);
document.addEventListener("click", follow);
measurePicker?.addEventListener("change", () => showMeasure());
find("#head")?.addEventListener("change", (event) => {
  if (event.target.value !== "") choose(Number(event.target.value));
  event.target.value = "";
});
for (const button of findAll(".sortable thead button")) button.addEventListener("click", () => sortBy(button.parentElement));
for (const query of [dark, narrow]) query.addEventListener("change", drawAll);
document.documentElement.dataset.ready = "true";
