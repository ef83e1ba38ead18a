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
// Paper is light.
let theme = null;
addEventListener("beforeprint", () => { theme ??= document.documentElement.dataset.theme; document.documentElement.dataset.theme = "light"; });
addEventListener("afterprint", () => { document.documentElement.dataset.theme = theme ?? "light"; theme = null; });
addEventListener("keydown", (event) => { if (event.key === "Escape") document.activeElement?.closest("a.term")?.blur(); });
// The search quotes a page's text: neither the lists around it nor folded code.
addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const plain = Search.htmlToText;
  Search.htmlToText = (page, anchor) => {
    const article = new DOMParser().parseFromString(page, "text/html").querySelector("article");
    article?.querySelectorAll("details.hide").forEach((code) => code.remove());
    return plain(article ? `<div role="main">${article.outerHTML}</div>` : page, anchor);
  };
});
