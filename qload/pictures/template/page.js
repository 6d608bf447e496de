"use strict";
// Rows are data, and only those near to what is seen are elements: 10,000 of them open as fast as 10.
const RUN = 200;
const SHORT = 48; // characters that stay in one line
const SIZE = 64; // pixels of a picture's height, and of a map's width
const BAR = 6;
const UNBROKEN = 24; // characters of a name that is never broken
const tables = JSON.parse(document.getElementById("data").textContent);

const canvas = (width, text) => {
  const made = document.createElement("canvas");
  made.width = width;
  made.height = SIZE;
  made.title = text;
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", text);
  return [made, made.getContext("2d")];
};

// "2^-9: 3 10 42": a bar for each power of two.
const bars = (text) => {
  const counts = text.split(": ")[1].split(" ").map(Number);
  const [made, pen] = canvas(counts.length * BAR, text);
  const most = Math.max(...counts);
  pen.fillStyle = "#4493f8";
  counts.forEach((count, at) => {
    const height = count ? Math.max(1, (SIZE * count) / most) : 0;
    pen.fillRect(at * BAR, SIZE - height, BAR - 1, height);
  });
  return made;
};

// "0.1042: 5665 5556": a square for each digit, from 0, equal, to 9, as far as can be.
const map = (text) => {
  const lines = text.split(": ")[1].split(" ");
  const [made, pen] = canvas(SIZE, text);
  const [wide, high] = [SIZE / lines[0].length, SIZE / lines.length];
  lines.forEach((line, row) => {
    [...line].forEach((digit, column) => {
      pen.fillStyle = digit === "0" ? "#2da44e" : `hsl(${60 - 6.6 * digit} 85% ${80 - 4.5 * digit}%)`;
      pen.fillRect(column * wide, row * high, wide, high);
    });
  });
  return made;
};

// Parts of a text that may be broken behind the dots and lines of its names, and is copied without a break.
const breakable = (text) => {
  const parts = text.split(/(?<=[._/])(?=\w)/);
  return parts.flatMap((part, at) => (at ? [document.createElement("wbr"), part] : [part]));
};

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
    if (text && table.drawn[column]) {
      cell.append(table.drawn[column] === "map" ? map(text) : bars(text), text.split(": ")[0]);
    } else if (column === table.link && text && document.getElementById(text)) {
      const link = document.createElement("a");
      link.href = "#" + encodeURIComponent(text);
      link.textContent = text;
      cell.append(link);
    } else if (text.includes("\n")) {
      const details = document.createElement("details");
      const summary = document.createElement("summary");
      const [first, ...rest] = text.split("\n");
      summary.append(...breakable(first));
      details.append(summary, ...breakable(rest.join("\n")));
      cell.append(details);
    } else {
      if (text.length > UNBROKEN) cell.append(...breakable(text));
      else cell.textContent = text;
    }
    cell.dataset.title = heads[column].textContent.trim();
    if (table.numbers.includes(column)) cell.className = "number";
    if (text.length > SHORT && !table.drawn[column]) cell.className = "long";
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

  // Where a table is wider than its place, each row is a card, a line for each cell: nothing is cut off.
  const fit = () => {
    section.className = "table";
    if (scroll.scrollWidth > scroll.clientWidth) section.className = "table cards";
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
    fit();
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
    if (scroll.scrollTop + scroll.clientHeight > scroll.scrollHeight - 600) {
      more();
      if (section.className === "table") fit();
    }
  });
  window.addEventListener("resize", fit);
  fill();
}
