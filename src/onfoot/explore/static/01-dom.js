// Helpers: elements, formulas, and numbers as text.

const MATH = "http://www.w3.org/1998/Math/MathML";

/** An element: h("p", {class: "note", onclick: f}, "text", child). False and null children are skipped. */
function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "data") Object.assign(element.dataset, value);
    else if (key === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(key, "");
    else element.setAttribute(key === "class" ? "class" : key, value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child);
  }
}

/** The head of a table; a column of bars has no name. */
function columnHeads(names) {
  return h("thead", {}, h("tr", {}, names.map((name) => (name ? h("th", { scope: "col" }, name) : h("td")))));
}

/** A formula by its text, as MathML. */
function math(text) {
  const tree = state.doc && state.doc.math[text];
  return tree ? mathElement(tree) : h("span", { class: "plain-math" }, text);
}

/** A formula whose symbols are explained: on hover, on a tap, or all of them when it has the focus. */
function formula(text) {
  return h("span", { class: "formula", tabindex: "0" }, math(text));
}

function mathElement(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const [name, ...rest] = node;
  const element = document.createElementNS(MATH, name);
  if (rest.length && typeof rest[0] === "object" && !Array.isArray(rest[0])) {
    for (const [key, value] of Object.entries(rest.shift())) element.setAttribute(key, value);
  }
  for (const child of rest) element.append(mathElement(child));
  return element;
}

const MINUS = "−";

/** All digits of a number: parsed again, they give exactly the same float64. */
function exact(x) {
  if (x === Infinity) return "∞";
  if (x === -Infinity) return MINUS + "∞";
  return String(x).replace(/^-/, MINUS).replace("e-", "e" + MINUS);
}

/** A rounded number. */
function brief(x, digits = 4) {
  if (x === 0) return "0";
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "nan" : exact(x);
  const size = Math.abs(x);
  const text = size >= 1e5 || size < 1e-3 ? x.toExponential(Math.max(digits - 2, 0)) : x.toPrecision(digits);
  return text.replace(/^-/, MINUS).replace("e-", "e" + MINUS).replace("e+", "e");
}

/** A term of a sum: a rounded number with its sign. */
function signed(x, digits) {
  return x > 0 ? `+${brief(x, digits)}` : brief(x, digits);
}

/** An error with one significant digit. */
function tiny(x) {
  return x === 0 ? "0" : x.toExponential(0).replace("e-", "e" + MINUS).replace("e+", "e");
}

function percent(x) {
  return (100 * x).toFixed(1).replace(/^-/, MINUS) + " %";
}

const grouped = (n) => String(n).replace(/\B(?=(\d{3})+$)/g, ","); // integers
const times = (shape) => (shape.length ? shape.join(" × ") : "1");
const plural = (n, one, many) => `${grouped(n)} ${n === 1 ? one : many || one + "s"}`;

/** The label of an index of an axis: a token with its position, a feature's number, or a vocabulary token. */
function indexLabel(meta, axis, index) {
  const kind = meta.axes[axis];
  const own = axis === meta.axes.length - 1 ? meta.columns : meta.rows;
  const at = own && (axis === 0 || meta.axes.length === 1 || own === meta.columns) ? own[index] : index;
  if (axis === 0 && meta.row_labels) return meta.row_labels[index];
  if (kind === "token") return `${at} ${tokenText(at)}`;
  if (kind === "vocabulary") return quoted(state.doc.vocabulary[at]);
  return String(at);
}

const quoted = (text) => `“${text}”`;
const tokenText = (t) => (t in state.doc.tokens ? quoted(state.doc.tokens[t].text) : ""); // a shorter text may have replaced this one

/** The label of a cell, such as 3 “v”, 7 for Δ_5[3 “v”, 7]; vectors have no row. */
function cellLabel(meta, r, c) {
  if (meta.axes.length === 0) return "";
  if (meta.axes.length === 1) return indexLabel(meta, 0, c);
  return `${indexLabel(meta, 0, r)}, ${indexLabel(meta, 1, c)}`;
}
