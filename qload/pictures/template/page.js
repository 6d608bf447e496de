"use strict";
// Rows are data; a batch becomes elements when it is scrolled into view, so 10,000 rows open as fast as 10.
const ROWS_PER_BATCH = 200;
const MAX_LINE_CHARACTERS = 48; // a longer text is wrapped
const PICTURE_HEIGHT_PX = 64; // also the width of a map
const BAR_WIDTH_PX = 6;
const MAX_UNBROKEN_CHARACTERS = 24; // a longer name may be broken
const tables = JSON.parse(document.getElementById("data").textContent);

const canvas = (width, text) => {
  const element = document.createElement("canvas");
  element.width = width;
  element.height = PICTURE_HEIGHT_PX;
  element.title = text;
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", text);
  return [element, element.getContext("2d")];
};

// Draw a histogram, "2^-9: 3 10 42": a bar per power of two.
const bars = (text) => {
  const counts = text.split(": ")[1].split(" ").map(Number);
  const [element, pen] = canvas(counts.length * BAR_WIDTH_PX, text);
  const largest = Math.max(...counts);
  pen.fillStyle = "#4493f8";
  counts.forEach((count, at) => {
    const height = count ? Math.max(1, (PICTURE_HEIGHT_PX * count) / largest) : 0;
    pen.fillRect(at * BAR_WIDTH_PX, PICTURE_HEIGHT_PX - height, BAR_WIDTH_PX - 1, height);
  });
  return element;
};

// Draw an error map, "0.1042: 5665 5556": a rectangle per digit, from 0 (equal) to 9 (largest error).
const map = (text) => {
  const lines = text.split(": ")[1].split(" ");
  const [element, pen] = canvas(PICTURE_HEIGHT_PX, text);
  const [width, height] = [PICTURE_HEIGHT_PX / lines[0].length, PICTURE_HEIGHT_PX / lines.length];
  lines.forEach((line, row) => {
    [...line].forEach((digit, column) => {
      pen.fillStyle = digit === "0" ? "#2da44e" : `hsl(${60 - 6.6 * digit} 85% ${80 - 4.5 * digit}%)`;
      pen.fillRect(column * width, row * height, width, height);
    });
  });
  return element;
};

// Allow line breaks after dots, slashes and underscores of names; copied text has no breaks.
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
      if (text.length > MAX_UNBROKEN_CHARACTERS) cell.append(...breakable(text));
      else cell.textContent = text;
    }
    cell.dataset.title = heads[column].textContent.trim();
    if (table.numbers.includes(column)) cell.className = "number";
    if (text.length > MAX_LINE_CHARACTERS && !table.drawn[column]) cell.className = "long";
    return cell;
  };

  const more = () => {
    const rows = shown.slice(count, count + ROWS_PER_BATCH).map((at) => {
      const row = document.createElement("tr");
      row.append(...table.rows[at].map(cellOf));
      return row;
    });
    body.append(...rows);
    count += rows.length;
  };

  // Show the rows of a table wider than the page as cards with a line per cell.
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

  // Sort numbers in names by value, layer 2 before layer 10; empty cells are last in both directions.
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
