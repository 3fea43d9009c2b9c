"use strict";
{
  // The theme knows its mode only from the second page on, and no colours until its script runs.
  const { dataset } = document.documentElement;
  dataset.mode ||= "auto";
  dataset.theme ||= matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";

  // The theme's buttons drop the focus when pressed, by which those without a mouse lose their place.
  const stay = (event) => {
    const button = event.target.closest("button");
    if (button) {
      button.blur = event.detail == 0 ? () => {} : HTMLElement.prototype.blur;
    }
  };
  addEventListener("click", stay, { capture: true });

  // What scrolls sideways in a box of its own can be reached, and so scrolled, by keyboard.
  const boxes = ["pre", "div.math", ".pst-scrollable-table-container", ".text_html", ".text_html div"];
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1;
    }
  });
  addEventListener("DOMContentLoaded", () => {
    for (const box of document.querySelectorAll(`.bd-article :is(${boxes})`)) {
      observer.observe(box);
    }
    for (const entry of document.querySelectorAll("[role=doc-biblioentry]")) {
      entry.role = "listitem"; // the other is deprecated
    }
  });
}
