// The numbers of the heads: what a column holds, and how it is said.
const columnNamed = Object.fromEntries(report.columns.map((column) => [column.name, column]));
const drawn = report.columns.filter((column) => column.meaning);
const silent = Object.fromEntries(drawn.map((column) => [column.name, new Set(column.silent)]));

function shown(value, digits) {
  if (value === null || value === undefined) return "–";
  if (digits === null) return Number.isInteger(value) || Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
  if (value !== 0 && Math.abs(value) < 0.5 * 10 ** -digits) return value.toExponential(0);
  return value.toFixed(digits);
}

const said = (column, head) => column.words?.[head] ?? shown(column.values[head], column.digits);
const around = (column, head) => {
  const spread = column.spread?.[head] ?? null;
  return spread === null ? "" : ` ± ${shown(spread, column.digits)}`;
};
const nameOf = (head) => `layer ${report.heads.layer[head]}, head ${report.heads.head[head]}`;
const panelOf = (head) => report.heads.panel[head];
const wordOf = (coded, head) => coded.words[coded.of[head]];
const fullName = (head) => (report.panels.length > 1 ? `${report.panels[panelOf(head)].title}, ` : "") + nameOf(head);
