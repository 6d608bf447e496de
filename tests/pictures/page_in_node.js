// Runs the script of a page on elements that only remember what was done to them, and prints that as JSON.
"use strict";
const text = require("fs").readFileSync(process.argv[2], "utf8");
const data = text.match(/<script type="application\/json" id="data">([\s\S]*?)<\/script>/)[1];
const script = text.match(/<script>([\s\S]*?)<\/script>/)[1];

class Made {
  constructor(tag) {
    Object.assign(this, { tag, kids: [], held: {}, attributes: {}, dataset: {}, on: {}, rects: [], textContent: "" });
  }
  append(...kids) { this.kids.push(...kids); }
  replaceChildren(...kids) { this.kids = kids; }
  setAttribute(name, value) { this.attributes[name] = value; }
  getAttribute(name) { return this.attributes[name]; }
  addEventListener(name, done) { this.on[name] = done; }
  querySelector(what) { return (this.held[what] ??= new Made(what)); }
  querySelectorAll() { return this.heads; }
  getContext() {
    const pen = { fillRect: (...box) => this.rects.push([pen.fillStyle, ...box]) };
    return pen;
  }
}

const sections = JSON.parse(data).map((table, at) => {
  const section = new Made("section");
  section.dataset.table = String(at);
  section.querySelector("input").value = "";
  section.heads = table.columns.map((title) => Object.assign(new Made("th"), { textContent: ` ${title}\n` }));
  Object.assign(section.querySelector(".scroll"), { clientWidth: 400, scrollWidth: Number(process.argv[4] ?? 400) });
  return section;
});
global.document = {
  getElementById: (id) => (id === "data" ? { textContent: data } : null),
  createElement: (tag) => new Made(tag),
  querySelectorAll: () => sections.filter((_, at) => JSON.parse(data)[at].rows.length),
};
global.window = { addEventListener: () => {} };
new Function(script)();

const rows = (section) => section.querySelector("tbody").kids;
const section = sections.at(-1);
const first = rows(section).length;
const look = section.className;
const titles = rows(section)[0].kids.map((cell) => cell.dataset.title);
const canvases = rows(section)[0].kids.flatMap((cell) => cell.kids).filter((kid) => kid.tag === "canvas");
section.heads[0].querySelector("button").on.click();
const names = rows(section).map((row) => row.kids[0].textContent);
section.querySelector("input").value = process.argv[3];
section.querySelector("input").on.input();
console.log(JSON.stringify({
  first,
  names,
  look,
  titles,
  small: section.querySelector("small").textContent,
  drawn: canvases.map((each) => ({ title: each.title, width: each.width, rects: each.rects })),
}));
