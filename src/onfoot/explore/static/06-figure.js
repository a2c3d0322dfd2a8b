// A figure: an array with its formula, gradient check, heat map and selected number.

/** Figures that share one selected cell. */
class Linked {
  constructor(cell) {
    this.cell = cell || { r: 0, c: 0 };
    this.figures = [];
  }

  add(figure) {
    this.figures.push(figure);
  }

  choose(r, c) {
    this.cell = { r, c };
    for (const figure of this.figures) figure.select(r, c);
    if (this.onchange) this.onchange(r, c);
  }

  hover(cell, from) {
    for (const figure of this.figures) if (figure !== from && figure.map) figure.map.setHover(cell);
  }
}

const TOKENS_ARE_COLUMNS = new Set(["a_0", "ℓ"]); // of a single row: its columns are the rows of all other arrays

/** A cell of an array as the cell that the figures of its step share, where the row is the token. */
const linkedCell = (id, r, c) => (TOKENS_ARE_COLUMNS.has(id) ? { r: c, c: state.cell ? state.cell.c : 0 } : { r, c });

/** The same in the other direction. */
const ownCell = (id, { r, c }) => (TOKENS_ARE_COLUMNS.has(id) ? { r: 0, c: r } : { r, c });

class Figure {
  /** options: id, linked, terms (false: no explanation), compact, plain (symbol as title), maxHeight */
  constructor(options) {
    Object.assign(this, options);
    this.meta = store.meta(this.id);
    this.linked.add(this);
    this.answer = h("div", { class: "answer", "aria-live": "off" });
    this.plot = h("div", { class: "plot" });
    this.element = h(
      "figure",
      { class: `figure ${this.meta.gradient ? "is-gradient" : ""} ${this.compact ? "compact" : ""}`, data: { tensor: this.id } },
      this.caption(),
      this.plot,
      this.answer,
    );
    this.element.addEventListener("choose", (event) => this.choose(event.detail.r, event.detail.c));
    this.element.figure = this;
    this.ready = this.show().catch((error) => this.plot.replaceChildren(h("p", { class: "aside" }, error.message)));
    this.element.ready = this.ready;
  }

  caption() {
    const { meta } = this;
    if (this.plain) return h("figcaption", {}, h("div", { class: "title" }, h("span", { class: "formula" }, math(meta.symbol)), meta.gradient && badge(this.id)));
    const formula = meta.formula ? math(meta.formula) : math(meta.symbol);
    return h(
      "figcaption",
      {},
      h(
        "div",
        { class: "title" },
        h("span", { class: "formula", tabindex: "0" }, formula),
        (meta.equations || []).length > 0 && h("span", { class: "eq", tabindex: "0" }, `eq ${meta.equations.join(", ")}`),
        h("span", { class: "shape" }, times(meta.shape)),
        meta.gradient && badge(this.id),
      ),
      meta.where && !this.compact && meta.where.map((part) => h("div", { class: "where" }, math(part))),
      meta.note && h("div", { class: "aside" }, meta.note),
    );
  }

  async show() {
    const difference = isDifference(this.meta);
    if (isWide(this.meta) || leftOut(this.id)) {
      if (difference) this.element.append(h("p", { class: "aside" }, "This array is shown in parts: its numbers, not the difference."));
      return showWide(this);
    }
    this.matrix = await store.matrix(this.id);
    if (difference) {
      this.now = this.matrix;
      this.first = await matrixAtFirst(this.id);
      this.matrix = differenceOf(this.now, this.first);
      this.element.classList.add("is-difference");
      this.element.querySelector(".title").append(h("span", { class: "aside" }, `difference from ${firstStep(state.doc)}`));
    }
    const scale = difference ? 0 : await store.scale(this.id);
    const { r, c } = ownCell(this.id, this.linked.cell);
    this.map = new HeatMap({
      scale,
      names: this.id === "a_0", // token ids name tokens: they have no size
      matrix: this.matrix,
      meta: this.meta,
      label: difference ? `${this.meta.symbol}, difference from ${firstStep(state.doc)}` : this.meta.symbol,
      maxHeight: this.maxHeight,
      selected: { r: Math.min(r, this.matrix.rows - 1), c: Math.min(c, this.matrix.cols - 1) },
      onselect: (row, column) => this.choose(row, column),
      onhover: (cell) => this.linked.hover(cell, this),
    });
    this.plot.replaceChildren(this.map.element, this.map.names ? "" : legend(this.map.largest, this.map.signed));
    if (this.map.found < this.map.largest) this.plot.append(h("p", { class: "aside rounding" }, `rounding only: at most ${tiny(this.map.found)}`));
    await this.explain();
  }

  choose(r, c) {
    if (TOKENS_ARE_COLUMNS.has(this.id)) this.linked.choose(c, this.linked.cell.c);
    else this.linked.choose(r, c);
    chosenIn(this, r, c);
  }

  select(...cell) {
    const { r, c } = ownCell(this.id, { r: cell[0], c: cell[1] });
    if (this.wide) this.wide.select(r, c);
    if (!this.map || this.wide) return;
    const row = Math.min(r, this.matrix.rows - 1);
    const column = Math.min(c, this.matrix.cols - 1);
    this.map.select(row, column);
    this.pending = this.explain();
  }

  async explain() {
    const { r, c } = this.map.selected;
    if (this.first) return this.answer.replaceChildren(explainDifference(this, r, c));
    if (this.terms === false) {
      const value = this.matrix.at(r, c);
      const label = h("span", { class: "at" }, `[${cellLabel(this.meta, r, c)}]`);
      const out = h("output", { class: "value", data: { value: String(value) } }, exact(value));
      this.answer.replaceChildren(h("p", { class: "number" }, math(this.meta.symbol), label, " = ", out));
      return;
    }
    const shown = await explained(this.id, r, c);
    const now = this.map.selected;
    if (now.r === r && now.c === c) this.answer.replaceChildren(shown);
  }
}

/** The gradient check by finite differences and by autograd, filled in when the results arrive. */
function badge(id) {
  const element = h("span", { class: "badge waiting", tabindex: "0", data: { proof: id } }, "…");
  fillBadge(element, id);
  return element;
}

function fillBadge(element, id) {
  const difference = state.proofs[id];
  const autograd = state.autograds[id];
  if (!difference) return;
  const good = difference.passed && (!autograd || autograd.passed);
  element.className = `badge ${good ? "proven" : "failed"}`;
  element.dataset.error = String(difference.error);
  if (autograd) element.dataset.autograd = String(autograd.error);
  element.title =
    `Derivative along a random direction: formula ${exact(difference.formula)}, finite difference ` +
    `${exact(difference.difference)}, relative error ${tiny(difference.error)}.` +
    (difference.sampled ? ` ${difference.sampled} entries were moved: half at random, half the largest.` : "") +
    (autograd ? ` PyTorch autograd: relative error ${tiny(autograd.error)}.` : state.doc.model.autograd ? "" : " PyTorch is not installed.");
  element.replaceChildren(`${good ? "✓" : "✗"} finite diff ${tiny(difference.error)}${autograd ? ` · autograd ${tiny(autograd.error)}` : ""}`);
}

/** Fetches the checks of the gradients of some steps by one method ("proof" or "autograd") and fills their badges. */
function prove(method, steps) {
  const { doc } = state;
  const isNew = steps.filter((id) => !state.proving[`${method} ${id}`]);
  const show = (proofs) => state.doc === doc && showProofs(method, isNew, proofs);
  const request = isNew.length ? store.proofs(method, isNew).then(show) : null;
  for (const id of isNew) state.proving[`${method} ${id}`] = request;
  return Promise.all(steps.map((id) => state.proving[`${method} ${id}`]));
}

function showProofs(method, steps, proofs) {
  Object.assign(method === "proof" ? state.proofs : state.autograds, proofs);
  for (const element of document.querySelectorAll("[data-proof]")) {
    if (element.dataset.proof in proofs) fillBadge(element, element.dataset.proof);
  }
  for (const id of steps) markProven(id);
}
