// The claims ledger: the fields above the table filter its rows, a click on a head sorts them.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("table.ledger");
  if (!table) return;
  const body = table.tBodies[0], rows = [...body.rows];
  const form = Object.assign(document.createElement("form"), { className: "ledger-filter" });
  const count = Object.assign(document.createElement("output"), { ariaLive: "polite" });
  const search = Object.assign(document.createElement("input"), { type: "search", placeholder: "words" });
  const select = (name) => {
    const field = document.createElement("select");
    const values = [...new Set(rows.map((row) => row.dataset[name]))].filter(Boolean);
    field.append(...["all", ...values].map((value) => new Option(value, value === "all" ? "" : value)));
    return field;
  };
  const chosen = { verdict: select("verdict"), paper: select("paper"), subject: select("subject") };
  const labels = [["Show", search], ["Verdict", chosen.verdict], ["Paper", chosen.paper], ["Judged on", chosen.subject]];
  for (const [name, field] of labels) {
    const label = document.createElement("label");
    label.append(`${name} `, field);
    form.append(label);
  }
  form.append(count);
  table.parentElement.before(form);

  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const fits = words.every((word) => text.includes(word));
      row.hidden = !(fits && Object.entries(chosen).every(([name, field]) => ["", row.dataset[name]].includes(field.value)));
    }
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();

  const value = (row, column) => {
    const cell = row.cells[column], number = parseFloat(cell.dataset.sort);
    return cell.dataset.sort === undefined ? cell.textContent : Number.isNaN(number) ? -Infinity : number;
  };
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent });
    // A button is blank where the head of a table is repeated on paper: there, words take its place.
    const words = Object.assign(document.createElement("span"), { textContent: head.textContent });
    head.replaceChildren(button, words);
    button.addEventListener("click", () => {
      const up = head.ariaSort !== "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.ariaSort = up ? "ascending" : "descending";
      const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (up ? 1 : -1);
      rows.sort((a, b) => order(value(a, column), value(b, column)));
      body.append(...rows);
    });
  });
});
