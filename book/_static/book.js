// What the theme and pandas leave out for screen readers and keyboards.
function mend() {
  const sidebar = document.querySelector(".bd-sidebar-primary");
  sidebar?.setAttribute("role", "complementary");
  sidebar?.setAttribute("aria-label", "Book");
  for (const head of document.querySelectorAll(".bd-article th")) {
    if (!head.textContent.trim()) head.setAttribute("role", "cell"); // it heads nothing
  }
  for (const region of document.querySelectorAll(".bd-article :is(div, pre, section), .bd-sidebar-secondary, .bd-sidebar-primary")) {
    const style = getComputedStyle(region);
    const scrolls = (region.scrollWidth > region.clientWidth && /auto|scroll/.test(style.overflowX))
      || (region.scrollHeight > region.clientHeight && /auto|scroll/.test(style.overflowY));
    if (scrolls && region.tabIndex < 0) region.tabIndex = 0;
  }
}
addEventListener("load", mend);
addEventListener("resize", mend);
setTimeout(mend, 1000); // tables are drawn by then
