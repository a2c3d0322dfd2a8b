// The glossary: every symbol and operator of a formula is explained on hover, focus and tap, and in a panel.

let lastPointer = ""; // "mouse", "touch" or "pen": not every browser has it in a click
const SCRIPTED = new Set(["msub", "msup", "msubsup"]);

/** The entry of a symbol: its own, or that of its kind (a_5 is an a_i). */
function glossaryEntry(symbol) {
  if (!glossaryEntry.table) glossaryEntry.table = new Map(GLOSSARY.entries.map((entry) => [entry.symbol, entry]));
  const general = symbol.replace(/_\d+/, "_i").replace(/\^\w+/, "^h");
  const names = [symbol, general, symbol.replace(/\^\w+/, "")];
  return names.map((name) => glossaryEntry.table.get(name)).find(Boolean);
}

/** A node of a formula in the glossary's spelling: <msub>a 5</msub> is a_5. Transposes and powers are symbols of their own. */
function symbolName(node) {
  if (node.localName === "mover") return accentOf(node) === "~" ? symbolName(node.children[0]) : "ā";
  if (!SCRIPTED.has(node.localName)) return node.textContent.trim().replace("∑", "Σ");
  const [base, second, third] = node.children;
  const sub = node.localName === "msup" ? null : second;
  const sup = node.localName === "msub" ? null : third || second;
  const raised = sup ? raisedSymbols(sup, base) : [];
  const own = (sign) => raised.filter((one) => one === sign).join("");
  const head = raised.find((one) => one.startsWith("^")) || "";
  return symbolName(base) + own("ᵇ") + own("′") + (sub ? `_${sub.textContent}` : "") + head;
}

/** What stands above a symbol: ᵗ, ᵇ, ′, a power, or the index of a head as ^h. */
function raisedSymbols(sup, base) {
  const atoms = sup.localName === "mrow" ? [...sup.children] : [sup];
  const signs = { t: "ᵗ", b: "ᵇ", "′": "′", 2: "²", 3: "³" };
  const isSignal = base.textContent === "Δ";
  return atoms.map((atom) => {
    const text = atom.textContent;
    return text in signs && !(isSignal && /\d/.test(text)) ? signs[text] : `^${text}`;
  });
}

const accentOf = (node) => node.children[1].textContent;

/** The symbol at an element of a formula: the letter with its index, or the sign above it. */
function symbolAt(element) {
  let node = element;
  if (node.localName === "math" || node.localName === "mspace" || node.localName === "mrow") return "";
  if (node.localName === "msqrt") return "√";
  for (let parent = node.parentElement; parent && parent.localName !== "math"; parent = node.parentElement) {
    if (parent.localName === "mover" && accentOf(parent) === "~") return node === parent.children[1] ? "~" : symbolName(node);
    if (SCRIPTED.has(parent.localName) && parent.localName !== "msub" && node === parent.lastElementChild) {
      const [sign] = raisedSymbols(node, parent.children[0]);
      if ("ᵗ²³".includes(sign)) return sign;
    } else if (!SCRIPTED.has(parent.localName) && parent.localName !== "mover" && parent.localName !== "mrow") break;
    node = parent;
  }
  return symbolName(node);
}

/** All symbols of a formula that the glossary explains, each once. */
function symbolsIn(formula) {
  const found = [];
  for (const leaf of formula.querySelectorAll("mi, mo, mn, mtext, msqrt")) {
    const symbol = symbolAt(leaf);
    if (symbol && glossaryEntry(symbol) && !found.includes(symbol)) found.push(symbol);
  }
  return found;
}

/** The array of this run that a symbol means, as near as possible to the open step. */
function arrayOf(symbol) {
  const step = state.doc && state.steps.get(state.step);
  if (!step || state.view === "step") return null; // the v of AdamW is not that of a head
  const near = [step.head === null ? "" : `${step.block}.${step.head}.`, step.block === null ? "" : `${step.block}.`, ""];
  const id = near.map((prefix) => prefix + symbol).find((one) => store.has(one));
  return id ? { ...store.meta(id), step: state.steps.get(stepOf(id)) } : null;
}

/** A symbol as a formula: as the document has it, or its kind with the right index. */
function glyph(symbol) {
  if (state.doc && state.doc.math[symbol]) return math(symbol);
  const { tree } = glossaryEntry(symbol);
  const index = /_(\d+)/.exec(symbol);
  return mathElement(index ? JSON.parse(JSON.stringify(tree).replace('["mi","i"]', `["mn","${index[1]}"]`)) : tree);
}

/** Words with the indices of their symbols lowered: a_i. */
function withIndices(text) {
  return text.split(/(?<=[a-zΔρ])_([a-zρ])(?![a-z])/).map((part, i) => (i % 2 ? h("sub", {}, part) : part));
}

/** What one or several symbols of the same kind mean. */
function glossaryLine(...symbols) {
  const entry = glossaryEntry(symbols[0]);
  if (!entry) return null;
  const array = symbols.length === 1 && /^[aāΔℓρqkvyw]/.test(symbols[0]) ? arrayOf(symbols[0]) : null;
  const made = array && array.step && store.meta(array.step.forward).symbol === symbols[0] ? `; here the output of ${array.step.name}` : "";
  const shape = array && array.shape.length > 0 ? times(array.shape) : entry.shape;
  return h(
    "div",
    { class: "gloss", data: { symbol: symbols.join(" ") } },
    h("span", { class: "gloss-symbol" }, symbols.map((symbol, i) => [i > 0 && ", ", glyph(symbol)])),
    h("div", {}, h("b", {}, entry.name, made), ". ", withIndices(entry.meaning), shape && h("span", { class: "shape" }, " ", withIndices(shape))),
  );
}

/** One line per meaning. */
function glossaryLines(symbols) {
  const kinds = new Map();
  for (const symbol of symbols) {
    const entry = glossaryEntry(symbol);
    kinds.set(entry, [...(kinds.get(entry) || []), symbol]);
  }
  return [...kinds.values()].map((same) => glossaryLine(...same));
}

const glossaryTip = {
  element: null,
  anchor: null, // what is explained, and where it was
  show(lines, anchor, owner) {
    const box = anchor.getBoundingClientRect();
    const shown = lines.filter(Boolean);
    if (!shown.length) return this.hide();
    if (!this.element) document.body.append((this.element = h("div", { class: "gloss-tip", id: "gloss-tip", role: "tooltip" })));
    this.element.replaceChildren(...shown);
    this.element.hidden = false;
    const own = this.element.getBoundingClientRect();
    const x = Math.min(Math.max(box.left, 6), document.documentElement.clientWidth - own.width - 6);
    const below = box.bottom + 8 + own.height < innerHeight;
    this.element.style.transform = `translate(${Math.max(x, 4)}px, ${below ? box.bottom + 8 : Math.max(box.top - own.height - 8, 4)}px)`;
    this.anchor = { element: anchor, x: box.x, y: box.y };
    this.owner = owner || null;
    if (owner) owner.setAttribute("aria-describedby", "gloss-tip");
    return undefined;
  },
  hide() {
    if (this.owner) this.owner.removeAttribute("aria-describedby");
    this.owner = this.anchor = null;
    if (this.element) this.element.hidden = true;
  },
  /** Hides it once what it explains has moved away from it. The event of a scroll that ended before it was shown moves nothing. */
  follow() {
    if (!this.anchor) return;
    const { x, y } = this.anchor.element.getBoundingClientRect();
    if (Math.abs(x - this.anchor.x) + Math.abs(y - this.anchor.y) > 1) this.hide();
  },
};

/** Where an equation's number is from. */
function equationLine(element) {
  const ids = element.textContent.replace(/^eq /, "").split(", ");
  const own = ids.filter((id) => /^[A-Z]/.test(id));
  const printed = ids.filter((id) => !own.includes(id));
  return h(
    "div",
    { class: "gloss" },
    h("div", {}, printed.length > 0 && `Equation ${printed.join(" and ")} of ${GLOSSARY.paper}. `, own.length > 0 && `${own.join(" and ")}: an equation of onfoot’s own, derived in docs/equations.`),
  );
}

/** Explains what is under the pointer or finger. */
function explainAt(target) {
  const element = target instanceof Element ? target : null;
  if (!element) return false;
  const equation = element.closest(".eq");
  if (equation) glossaryTip.show([equationLine(equation)], equation);
  else if (element.closest("math")) {
    const line = glossaryLine(symbolAt(element));
    if (!line) return false;
    glossaryTip.show([line], element);
  } else return false;
  return true;
}

/** A focused formula lists all its symbols. */
function explainFocused(element) {
  if (!element.matches(":focus-visible")) return;
  if (element.matches(".eq")) glossaryTip.show([equationLine(element)], element, element);
  else if (element.matches(".formula")) {
    const formula = element.querySelector("math");
    if (formula) glossaryTip.show(glossaryLines(symbolsIn(formula)), element, element);
  }
}

/** The panel with all symbols. */
function openSymbols() {
  let panel = document.getElementById("symbols");
  if (!panel) {
    panel = h(
      "dialog",
      { id: "symbols", class: "symbols", "aria-label": "Symbols" },
      h("header", {}, h("h2", {}, "Symbols"), h("button", { type: "button", class: "quiet", onclick: () => panel.close() }, "Close")),
      h("p", { class: "lead" }, `T is the number of tokens of the text, d the width of the network, V the size of the vocabulary. Equation numbers are those of ${GLOSSARY.paper}; ids with letters, such as FC.2, are onfoot’s own.`),
      h("div", { class: "symbol-list" }, GLOSSARY.entries.map((entry) => glossaryLine(entry.symbol))),
    );
    panel.addEventListener("close", () => typeof writeHash === "function" && writeHash());
    document.body.append(panel);
  }
  glossaryTip.hide();
  if (!panel.open) panel.showModal();
  if (typeof writeHash === "function") writeHash();
}

function setUpGlossary() {
  const open = () => Boolean(document.querySelector("#symbols[open]"));
  document.getElementById("take-tour").after(h("button", { type: "button", id: "show-symbols", class: "quiet", onclick: openSymbols }, "Symbols"));
  remember("symbols", () => (open() ? "1" : ""), (value) => {
    if (value && !open()) openSymbols();
    else if (!value && open()) document.getElementById("symbols").close();
  });
  document.addEventListener("pointerover", (event) => event.pointerType !== "touch" && (explainAt(event.target) || glossaryTip.owner || glossaryTip.hide()));
  document.addEventListener("pointerdown", (event) => (lastPointer = event.pointerType), { capture: true });
  document.addEventListener("click", (event) => lastPointer === "touch" && !event.target.closest("button") && (explainAt(event.target) || glossaryTip.hide()));
  document.addEventListener("focusin", (event) => explainFocused(event.target));
  document.addEventListener("focusout", () => glossaryTip.hide());
  document.addEventListener("scroll", () => glossaryTip.follow(), { capture: true, passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && glossaryTip.element && !glossaryTip.element.hidden && (event.preventDefault(), glossaryTip.hide()), { capture: true });
  document.getElementById("main").after(h("footer", { class: "cite aside" }, `Equation numbers are those of ${GLOSSARY.paper}; ids with letters are onfoot’s own.`));
}

setUpGlossary();
