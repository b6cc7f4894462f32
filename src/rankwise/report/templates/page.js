// What a reader does: follow a finding, choose a measure, turn the lights off.
function showMeasure(name) {
  if (name && columnNamed[name]?.meaning) measurePicker.value = name;
  for (const text of findAll("[data-meaning]")) text.hidden = text.dataset.meaning !== measurePicker.value;
  if (open !== null) drawNumbers(open);
  return mark(marked);
}

function followHeads(heads, measure) {
  marked = heads;
  const map = maps[panelOf(heads[0])];
  // The link itself leads to the panel and into the browser's history; a tall panel needs the way to the cell too.
  const shownThen = Promise.all([openHead(heads[0]), showMeasure(measure)]);
  shownThen.then(() => setTimeout(() => {
    map.focus({ preventScroll: true });
    if (beside.matches) scrollTo(find(".shapelayer path", map));
    else scrollTo(map, "start");
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
  if (!link || link === card) return;
  const target = link.dataset.finding ? report.targets[link.dataset.finding] : { section: "heads", heads: [Number(link.dataset.head)] };
  for (const other of findAll("[aria-current]")) other.removeAttribute("aria-current");
  link.setAttribute("aria-current", "true");
  if (target.section === "heads") followHeads(target.heads, target.measure);
  if (target.section === "states") followStates(target);
}

async function drawAll() {
  await Promise.all([...(maps.length ? [drawMaps()] : []), drawDepth(), drawImportance(), drawSpectra(), open === null ? null : drawMatrix(), drawMemberships()]);
}

if (maps.length) {
  const speaking = drawn.find((column) => column.silent.length < column.values.length);
  showMeasure((speaking ?? drawn[0]).name);
}
if (report.opening !== null && beside.matches) {
  marked = [report.opening];
  openHead(report.opening);
}
await drawAll();
maps.forEach(listenToMap);
listenToImportance();
makeTables();
document.addEventListener("click", follow);
measurePicker?.addEventListener("change", () => showMeasure());
find("#keep")?.addEventListener("click", () => keepSpectrum(open));
find("#close-head")?.addEventListener("click", closeHead);
for (const query of [dark, narrow, beside]) query.addEventListener("change", drawAll);
document.documentElement.dataset.ready = "true";
