// What a mouse reads in a title is shown on a tap as well, and on focus where Tab stops.

const titledAt = (target) => target instanceof Element && !target.closest("math, button") && target.closest('[title]:not([title=""])');

function showTitle(element, owner) {
  glossaryTip.show([h("div", { class: "gloss" }, h("div", {}, element.title))], element, owner);
}

function setUpTitles() {
  document.addEventListener("click", (event) => {
    const element = lastPointer === "touch" && titledAt(event.target);
    if (element) showTitle(element);
  });
  document.addEventListener("focusin", ({ target }) => target.matches(".badge, .term-value") && target.title && target.matches(":focus-visible") && showTitle(target, target));
}

setUpTitles();
