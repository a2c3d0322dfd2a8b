// Formulas that are wider than their box are broken into lines. What scrolls sideways all the same is a stop of Tab.

const FORMULA_BOXES = ".formula, .where, .formula-line, .term-label, .factors, .products .of, .row .forward, .row .backward";
const SCROLLERS = ".table-scroll";

const isTooWide = (box) => box.scrollWidth > box.clientWidth + 1;

/** Breaks the formulas that do not fit, and only those. */
function fitFormulas(panel) {
  for (const formula of panel.querySelectorAll("math.broken")) formula.classList.remove("broken");
  const wide = [...panel.querySelectorAll(FORMULA_BOXES)].filter(isTooWide);
  for (const box of wide) for (const formula of box.querySelectorAll("math")) formula.classList.add("broken");
}

function fitTables(panel) {
  const tables = [...panel.querySelectorAll(SCROLLERS)].map((box) => [box, isTooWide(box)]);
  for (const [box, wide] of tables) {
    if (wide && !box.hasAttribute("tabindex")) for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", "Table, scrolls sideways"]]) box.setAttribute(name, value);
  }
}

function setUpFit() {
  const panel = document.getElementById("panel");
  let waiting = 0;
  const fit = () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => {
      fitFormulas(panel);
      fitTables(panel);
    });
  };
  new MutationObserver(fit).observe(panel, { childList: true, subtree: true, attributes: true, attributeFilter: ["hidden", "open"] });
  new ResizeObserver(fit).observe(panel);
  document.fonts.addEventListener("loadingdone", fit); // with the mathematics font, formulas have another width
}

setUpFit();
