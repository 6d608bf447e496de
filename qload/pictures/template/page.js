"use strict";
// Rows are data, and only those near to what is seen are elements: 10,000 of them open as fast as 10.
const RUN = 200;
const SHORT = 48; // characters that stay in one line
const tables = JSON.parse(document.getElementById("data").textContent);

for (const section of document.querySelectorAll("section.table")) {
  const table = tables[Number(section.dataset.table)];
  const body = section.querySelector("tbody");
  const scroll = section.querySelector(".scroll");
  const heads = [...section.querySelectorAll("th")];
  const texts = table.rows.map((row) => row.map((cell) => (cell === null ? "" : String(cell))).join("\n").toLowerCase());
  let order = table.rows.map((_, at) => at);
  let shown = [];
  let count = 0;

  const cellOf = (value, column) => {
    const cell = document.createElement("td");
    const text = value === null ? "" : String(value);
    if (column === table.link && text && document.getElementById(text)) {
      const link = document.createElement("a");
      link.href = "#" + encodeURIComponent(text);
      link.textContent = text;
      cell.append(link);
    } else if (text.includes("\n")) {
      const details = document.createElement("details");
      const summary = document.createElement("summary");
      const [first, ...rest] = text.split("\n");
      summary.textContent = first;
      details.append(summary, rest.join("\n"));
      cell.append(details);
    } else {
      cell.textContent = text;
    }
    if (table.numbers.includes(column)) cell.className = "number";
    if (text.length > SHORT) cell.className = "long";
    return cell;
  };

  const more = () => {
    const rows = shown.slice(count, count + RUN).map((at) => {
      const row = document.createElement("tr");
      row.append(...table.rows[at].map(cellOf));
      return row;
    });
    body.append(...rows);
    count += rows.length;
  };

  const fill = () => {
    const words = section.querySelector("input").value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = order.filter((at) => words.every((word) => texts[at].includes(word)));
    const all = table.rows.length;
    section.querySelector("small").textContent = shown.length === all ? `${all}` : `${shown.length} of ${all}`;
    body.replaceChildren();
    scroll.scrollTop = 0;
    count = 0;
    more();
  };

  // Names count as people do, layer 2 before layer 10; cells without a value come last, whatever the direction.
  const names = new Intl.Collator("en", { numeric: true });
  const compare = (column, sign) => (one, other) => {
    const a = table.rows[one][column];
    const b = table.rows[other][column];
    if (a === null || b === null) return (a === null) - (b === null) || one - other;
    const found = table.numbers.includes(column) ? a - b : names.compare(a, b);
    return sign * found || one - other;
  };

  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((each) => each.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      order.sort(compare(column, sign));
      fill();
    });
  });
  section.querySelector("input").addEventListener("input", fill);
  scroll.addEventListener("scroll", () => {
    if (scroll.scrollTop + scroll.clientHeight > scroll.scrollHeight - 600) more();
  });
  fill();
}
