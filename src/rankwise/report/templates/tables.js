// Tables that are sorted by any column and saved as CSV; long tables are shown in part at first.
const MOST_ROWS = 200;

function headTable() {
  const { layer, head, grid, kind, mask, site, tokens, sequences, nonfinite, nearest, max_token: peak } = report.heads;
  const texts = (name, title, coded) => ({ name, short_title: title, texts: coded.of.map((at) => coded.words[at]) });
  const numbers = (name, title, values) => ({ name, short_title: title, digits: 0, values });
  const link = (at) => element("a", { href: `#grid-${grid[at]}`, textContent: `L${layer[at]} H${head[at]}` });
  const first = {
    short_title: "Head", order: layer.map((_, at) => at),
    cell: (at) => {
      const name = link(at);
      name.dataset.head = at;
      return report.grids.length > 1 ? [name, " ", element("small", { textContent: report.grids[grid[at]].title })] : [name];
    },
  };
  const only = { csv: true };
  return [
    first,
    { ...texts("site", "Site", site), ...only }, { ...numbers("layer", "Layer", layer), ...only }, { ...numbers("head", "Head", head), ...only },
    texts("kind", "Kind", kind), texts("mask", "Mask", mask), numbers("tokens", "Tokens", tokens),
    ...report.columns,
    { ...report.columns.find((column) => column.name === "nearest_head_distance"), name: "nearest_head", file_name: undefined, short_title: "Nearest head", digits: 0, values: nearest, spread: undefined, labels: undefined },
    texts("max_token", "Peak at", peak),
    numbers("sequences", "Sequences", sequences), numbers("nonfinite", "Not finite", nonfinite),
  ];
}

const rowsOf = (columns) => (columns[0].texts ?? columns[0].order ?? columns[0].values).length;
const keyOf = (column, row) => column.order?.[row] ?? column.texts?.[row] ?? column.values?.[row] ?? null;

// Rows without a number come last in both directions.
function compare(a, b, direction) {
  if (a === null || b === null) return (a === null) - (b === null);
  return direction * (typeof a === "string" ? a.localeCompare(b) : a - b);
}

class Table {
  constructor(place, columns) {
    this.place = place;
    this.columns = columns.filter((column) => !column.csv);
    this.all = columns;
    this.order = Array.from({ length: rowsOf(columns) }, (_, row) => row);
    this.whole = this.order.length <= MOST_ROWS;
    const titles = this.columns.map((column, at) => {
      const button = element("button", { type: "button", textContent: column.short_title });
      button.addEventListener("click", () => this.sortBy(at));
      return element("th", { scope: "col", className: column.texts ? "word" : "" }, button);
    });
    this.titles = titles;
    this.body = element("tbody");
    place.replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...titles)), this.body));
    this.more = element("button", { type: "button", className: "button", hidden: this.whole, textContent: `Show all ${this.order.length} rows` });
    this.more.addEventListener("click", () => { this.whole = true; this.fill(); });
    const save = element("button", { type: "button", className: "button", textContent: "Download CSV" });
    save.addEventListener("click", () => saveCsv(place.dataset.name, this.csvRows()));
    place.before(element("p", { className: "control" }, save, this.more));
    this.fill();
  }

  fill() {
    this.more.hidden = this.whole;
    const rows = this.whole ? this.order : this.order.slice(0, MOST_ROWS);
    this.body.replaceChildren(...rows.map((row) => element("tr", {}, ...this.columns.map((column, at) => this.cell(column, at, row)))));
  }

  cell(column, at, row) {
    const cell = element(at ? "td" : "th", { className: column.texts ? "word" : "" });
    if (!at) cell.scope = "row";
    if (column.cell) cell.append(...column.cell(row));
    else cell.textContent = column.texts ? column.texts[row] || "–" : label(column, row) + (column.over_seeds ? spreadLabel(column, row) : "");
    return cell;
  }

  sortBy(at) {
    const header = this.titles[at];
    const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of this.titles) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
    this.order.sort((a, b) => compare(keyOf(this.columns[at], a), keyOf(this.columns[at], b), direction));
    this.fill();
  }

  csvRows() {
    const columns = this.all.filter((column) => column.name)
      .map((column) => ({ ...column, name: column.file_name ?? column.name }))
      .flatMap((column) => (column.spread ? [column, { name: `${column.name}${column.over_seeds ? "_seed" : ""}_std`, values: column.spread }] : [column]));
    return [columns.map((column) => column.name), ...this.order.map((row) => columns.map((column) => keyOf(column, row)))];
  }
}

function makeTables() {
  if (find("#head-table")) new Table(find("#head-table"), headTable());
}

starters.push(makeTables);
