// The head that is open, beside the map or as a sheet below it.
const card = find("#head-card");
let open = null;

function findingsOf(head) {
  return report.targets.flatMap((target, index) => (target.section === "heads" && target.heads.includes(head) ? [index] : []));
}

function drawFindings(head) {
  const items = findingsOf(head).slice(0, 4).map((index) => {
    const finding = find(`#finding-${index}`);
    const link = element("a", { href: `#finding-${index}`, textContent: find(".kind b", finding).textContent });
    const about = report.targets[index].about;
    return element("li", { className: finding.classList[1] }, link, about ? ` of ${about}: ` : " ", find(".meaning", finding).textContent);
  });
  find("#head-findings").replaceChildren(...items);
}

// What removing the head costs, in the unit of the loss and as a share; exact and estimated where both are known.
function drawCosts(head) {
  const costs = report.costs;
  if (!costs) return [];
  return [["exact", "Cost of removal, exact"], ["estimate", "Cost of removal, estimated"]]
    .filter(([how]) => costs[how][head] !== null)
    .map(([how, name]) => {
      const cost = costs[how][head];
      const share = costs.reference ? ` (${(100 * cost / costs.reference).toFixed(1)} % of ${costs.of})` : "";
      const caution = how === "estimate" ? "for the order of heads; can be far too low" : "";
      return element("div", { className: `wide${measurePicker?.value === "removal_cost" ? " chosen" : ""}` },
        element("dt", { textContent: name }),
        element("dd", {}, element("b", { textContent: shown(cost, 4) }), ` ${costs.unit.startsWith("of ") ? "" : costs.unit}${share}`, element("small", { textContent: caution })));
    });
}

function drawNumbers(head) {
  const rows = drawn.filter((column) => (column.name !== "removal_cost" || !report.costs) && column.values[head] !== null || column.words?.[head]).map((column) => {
    const name = element("dt", { textContent: column.head });
    const value = element("dd", {}, element("b", { textContent: said(column, head) }), element("span", { className: "spread", textContent: around(column, head) }));
    const fresh = columnNamed[`init_${column.name}`];
    if (fresh && fresh.values[head] !== null) value.append(element("small", { textContent: `fresh ${said(fresh, head)}${around(fresh, head)}`, title: "The same head at fresh weights, mean ± standard deviation over seeds" }));
    if (silent[column.name].has(head)) value.replaceChildren(element("span", { textContent: "╱╱╱", title: "says nothing of a diagonal mixer" }));
    const chosen = column.name === measurePicker?.value;
    return element("div", { className: chosen ? "chosen" : "" }, name, value);
  });
  const nearest = report.heads.nearest[head];
  if (nearest !== null) rows.push(element("div", {}, element("dt", { textContent: "Nearest head" }), element("dd", {}, element("b", { textContent: String(nearest) }))));
  rows.push(...drawCosts(head));
  find("#head-numbers").replaceChildren(...rows);
}

function drawFacts(head) {
  const { kind, mask, site, max_token: peak, tokens, sequences, nonfinite } = report.heads;
  const facts = [wordOf(kind, head), wordOf(kind, head) === "diagonal" ? "" : `${wordOf(mask, head)} mask`, `${shown(tokens[head], 0)} tokens`, `${sequences[head]} sequences`];
  if (nonfinite[head]) facts.push(`not finite in ${nonfinite[head]} of ${nonfinite[head] + sequences[head]} sequences`);
  const mass = drawn.find((column) => column.name === "max_token_mass")?.values[head];
  if (wordOf(peak, head)) facts.push(`${Math.round(100 * mass)} % of the weight on ${wordOf(peak, head)}`);
  find("#head-name").textContent = fullName(head);
  find("#head-facts").textContent = facts.filter(Boolean).join(" · ");
  find("#head-site").textContent = wordOf(site, head);
}

function openHead(head) {
  open = head;
  card.hidden = false;
  card.dataset.head = head;
  card.classList.add("opened");
  drawFacts(head);
  drawFindings(head);
  drawNumbers(head);
  return Promise.all([drawSpectra(), drawMatrix()]);
}

function closeHead() {
  card.classList.remove("opened");
  find(".plot.heat")?.focus({ preventScroll: true });
}
