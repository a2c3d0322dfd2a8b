// Sub- and superscripts without the mathematics font, as where a browser loads no fonts: it puts them too high or too low.

// how far a script's baseline is below that of its base, in em of the base
const WANTED = { sub: 0.2, sup: -0.36, "both-sub": 0.26, "both-sup": -0.42 };

/** Corrects the scripts, once more when the font is there. */
function correctScripts() {
  placeScripts();
  document.fonts.load('1em "Onfoot Math"').then(placeScripts, () => undefined);
}

/** Measures where the browser puts scripts, and moves them to where a mathematics font would have them. */
function placeScripts() {
  const letter = (element) => ["mi", { mathvariant: "normal" }, element];
  const kinds = { sub: ["msub", letter("x"), letter("x")], sup: ["msup", letter("x"), letter("x")], subOfBoth: ["msubsup", letter("x"), letter("x"), letter("x")] };
  const box = h("div", { class: "script-test", "aria-hidden": "true" });
  document.body.append(box);
  const drop = (tree, which) => {
    box.replaceChildren(mathElement(["math", tree]));
    const [base, ...scripts] = box.querySelectorAll("mi");
    const size = parseFloat(getComputedStyle(base).fontSize);
    return (scripts[which].getBoundingClientRect().bottom - base.getBoundingClientRect().bottom) / size;
  };
  const found = { sub: drop(kinds.sub, 0), sup: drop(kinds.sup, 0), "both-sub": drop(kinds.subOfBoth, 0), "both-sup": drop(kinds.subOfBoth, 1) };
  const scale = parseFloat(getComputedStyle(box.querySelectorAll("mi")[1]).fontSize) / parseFloat(getComputedStyle(box.querySelector("mi")).fontSize);
  box.remove();
  for (const [name, at] of Object.entries(found)) {
    const off = WANTED[name] - at;
    const shift = Math.abs(off) > 0.09 ? off / scale : 0; // in em of the script
    document.documentElement.style.setProperty(`--${name}-shift`, `${shift.toFixed(3)}em`);
  }
}
