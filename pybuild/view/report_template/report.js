// The table is sorted by the column whose head is clicked; a second click turns it round.
document.querySelectorAll("th button").forEach((button) => {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const column = head.cellIndex;
    const down = head.getAttribute("aria-sort") !== "descending";
    document.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = document.querySelector("tbody");
    const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      return isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    };
    [...body.rows].sort((a, b) => (down ? -compare(a, b) : compare(a, b))).forEach((row) => body.append(row));
  });
});
