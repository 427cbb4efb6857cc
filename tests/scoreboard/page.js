"use strict";
const body = document.querySelector("tbody");
const dialog = document.querySelector("dialog");
const ORDER = ["FAIL", "ERROR", "CHOICE", "NOT SUPPORTED", "NOT RUN", "PASS"];
let sorted = null;

function key(row, column) {
  const cell = row.children[column];
  if (column === 0) return cell.textContent;
  if (cell.dataset.count !== undefined) return -Number(cell.dataset.count);
  return ORDER.indexOf(cell.querySelector("button").dataset.kind);
}

document.querySelectorAll("thead th").forEach((head, column) => {
  head.querySelector("button").addEventListener("click", () => {
    const descending = sorted === head && head.getAttribute("aria-sort") === "ascending";
    document.querySelectorAll("thead th").forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    sorted = head;
    const rows = [...body.rows].sort((one, other) => {
      const a = key(one, column), b = key(other, column);
      return (a < b ? -1 : a > b ? 1 : 0) * (descending ? -1 : 1);
    });
    body.append(...rows);
  });
});

body.addEventListener("click", (event) => {
  const button = event.target.closest("td button");
  if (button === null) return;
  for (const name of ["title", "outcome", "text", "note", "command"]) {
    const place = dialog.querySelector(`.${name}`);
    place.textContent = button.dataset[name] || "";
    place.hidden = place.textContent === "";
  }
  dialog.showModal();
});

document.documentElement.dataset.ready = "true";
