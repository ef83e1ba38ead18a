// Regions that scroll can be reached with the keyboard; Escape closes a term's explanation.
function reach() {
  for (const region of document.querySelectorAll(".bd-article :is(div, pre, table, section), .bd-sidebar-secondary, .bd-sidebar-primary")) {
    const style = getComputedStyle(region);
    const scrolls = (region.scrollWidth > region.clientWidth + 1 && /auto|scroll/.test(style.overflowX))
      || (region.scrollHeight > region.clientHeight + 1 && /auto|scroll/.test(style.overflowY));
    if (scrolls && region.tabIndex < 0) { region.tabIndex = 0; region.dataset.reach = ""; }
    if (!scrolls && "reach" in region.dataset) { region.removeAttribute("tabindex"); delete region.dataset.reach; }
  }
}
addEventListener("load", reach);
addEventListener("resize", reach);
document.addEventListener("toggle", reach, true);
addEventListener("keydown", (event) => { if (event.key === "Escape") document.activeElement?.closest("a.term")?.blur(); });

// A field above a table of class "filterable": rows that hold all of the words stay.
addEventListener("load", () => {
  for (const table of document.querySelectorAll("table.filterable")) {
    const field = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter rows", className: "filter" });
    const count = Object.assign(document.createElement("span"), { className: "filter-count" });
    field.setAttribute("aria-label", "Filter rows of the table");
    count.setAttribute("role", "status");
    table.parentElement.before(field, count);
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/), rows = [...table.tBodies[0].rows];
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      count.textContent = ` ${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
      reach();
    });
  }
});
