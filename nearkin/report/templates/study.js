"use strict";
// Sortable tables: a click on a heading sorts by its column, another click reverses the order. Search fields filter rows.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const ascending = head.getAttribute("aria-sort") === "descending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      const numbers = [parseFloat(x), parseFloat(y)];
      if (numbers.some(Number.isNaN)) {
        // Cells without a number come last in both orders.
        if (!numbers.every(Number.isNaN)) return Number.isNaN(numbers[0]) ? 1 : -1;
        return (ascending ? 1 : -1) * x.localeCompare(y);
      }
      return (ascending ? 1 : -1) * (numbers[0] - numbers[1]);
    });
    body.append(...rows);
  }));
}
for (const field of document.querySelectorAll("input[data-rows]")) {
  const rows = [...document.getElementById(field.dataset.rows).tBodies[0].rows];
  field.addEventListener("input", () => {
    const text = field.value.trim().toLowerCase();
    for (const row of rows) row.hidden = !row.dataset.name.toLowerCase().includes(text);
  });
}
