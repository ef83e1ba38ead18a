/* Tables in a box of class "filterable": a heading sorts, a menu for each column of data-filter and a text field filter.
   Without this script the whole table is there to read. A link to a folded block (details) opens it. */
"use strict";

function key(row, column) {
  const cell = row.cells[column];
  return cell.dataset.key ?? cell.textContent.trim();
}

function compare(a, b, turn) {
  if (a === "" || b === "") return (a === "") - (b === ""); // what has no value stands last, up and down
  const [x, y] = [parseFloat(a), parseFloat(b)]; // of an estimate with its interval, the estimate
  if (isNaN(x) !== isNaN(y)) return turn * (isNaN(x) - isNaN(y));
  return turn * (x - y || a.localeCompare(b, undefined, { numeric: true }));
}

function control(form, label, input) {
  const named = document.createElement("label");
  named.append(label + " ", input);
  form.append(named);
  return input;
}

function menu(form, head, rows, column) {
  const values = [...new Set(rows.map((row) => key(row, column)))];
  if (values.length < 2) return null;
  const chosen = control(form, head.textContent, document.createElement("select"));
  chosen.add(new Option("all", ""));
  values.forEach((value) => chosen.add(new Option(value, value)));
  return (row) => !chosen.value || key(row, column) === chosen.value;
}

function sortable(head, column, rows, body) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const turn = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    [...head.parentNode.cells].forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", turn === 1 ? "ascending" : "descending");
    body.append(...rows.sort((a, b) => compare(key(a, column), key(b, column), turn)));
  });
}

function enhance(box) {
  const table = box.querySelector("table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const form = document.createElement("form");
  form.className = "filters";
  const heads = [...table.tHead.rows[0].cells];
  const tests = heads.map((head, at) => ("filter" in head.dataset ? menu(form, head, rows, at) : null)).filter(Boolean);
  const text = control(form, "Search", document.createElement("input"));
  text.type = "search";
  const count = document.createElement("output");
  const show = () => {
    const words = text.value.toLowerCase().split(/\s+/);
    rows.forEach((row) => {
      const said = row.textContent.toLowerCase();
      row.hidden = !(tests.every((test) => test(row)) && words.every((word) => said.includes(word)));
    });
    count.value = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  form.append(count);
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  heads.forEach((head, column) => sortable(head, column, rows, body));
  box.before(form);
  show();
}

function open() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!(target instanceof HTMLDetailsElement)) return;
  target.open = true;
  target.scrollIntoView();
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("div.filterable").forEach(enhance);
  open();
});
window.addEventListener("hashchange", open);
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  if (link && link.hash === location.hash) open(); // the address does not change on a second click
});
