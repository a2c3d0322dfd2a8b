// A figure: an array with its formula, its proof, its colours, and the number that is selected in it.

/** Several figures in which the same cell is selected. */
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

  hover(place, from) {
    for (const figure of this.figures) if (figure !== from && figure.map) figure.map.setHover(place);
  }
}

class Figure {
  /** options: id, linked, terms (false: no explanation), compact, plain (symbol for a title), most (height) */
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
    this.element.addEventListener("choose", (event) => this.linked.choose(event.detail.r, event.detail.c));
    this.ready = this.show();
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
        h("span", { class: "formula" }, formula),
        (meta.equations || []).length > 0 && h("span", { class: "eq" }, `eq ${meta.equations.join(", ")}`),
        h("span", { class: "shape" }, times(meta.shape)),
        meta.gradient && badge(this.id),
      ),
      meta.where && !this.compact && meta.where.map((part) => h("div", { class: "where" }, math(part))),
      meta.note && h("div", { class: "aside" }, meta.note),
    );
  }

  async show() {
    this.matrix = await store.matrix(this.id);
    const { r, c } = this.linked.cell;
    this.map = new HeatMap({
      matrix: this.matrix,
      meta: this.meta,
      label: this.meta.symbol,
      most: this.most,
      selected: { r: Math.min(r, this.matrix.rows - 1), c: Math.min(c, this.matrix.cols - 1) },
      onselect: (row, column) => this.linked.choose(row, column),
      onhover: (place) => this.linked.hover(place, this),
    });
    this.plot.replaceChildren(this.map.element, legend(this.map.largest, this.map.signed));
    await this.explain();
  }

  select(r, c) {
    if (!this.map) return;
    const row = Math.min(r, this.matrix.rows - 1);
    const column = Math.min(c, this.matrix.cols - 1);
    this.map.select(row, column);
    this.pending = this.explain();
  }

  async explain() {
    const { r, c } = this.map.selected;
    if (this.terms === false) {
      const value = this.matrix.at(r, c);
      const place = h("span", { class: "at" }, `[${cellPlace(this.meta, r, c)}]`);
      const out = h("output", { class: "value", data: { value: String(value) } }, exact(value));
      this.answer.replaceChildren(h("p", { class: "number" }, math(this.meta.symbol), place, " = ", out));
      return;
    }
    const shown = await explanation(this.id, r, c);
    const now = this.map.selected;
    if (now.r === r && now.c === c) this.answer.replaceChildren(shown);
  }
}

/** What finite differences and autograd say about a gradient; measured when it is first looked at. */
function badge(id) {
  const element = h("span", { class: "badge waiting", data: { proof: id } }, "…");
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
    `Along a random direction the formula gives ${exact(difference.formula)}, a finite difference of the loss ` +
    `${exact(difference.difference)}: relative error ${tiny(difference.error)}.` +
    (autograd ? ` PyTorch’s autograd differs by ${tiny(autograd.error)}.` : state.doc.model.autograd ? "" : " PyTorch is not installed here.");
  element.replaceChildren(`${good ? "✓" : "✗"} difference ${tiny(difference.error)}${autograd ? ` · autograd ${tiny(autograd.error)}` : ""}`);
}

/** Fetches what one of the two says about the gradients of some steps, and fills the badges that wait for it. */
function prove(way, steps) {
  const isNew = steps.filter((id) => !state.proving[`${way} ${id}`]);
  const asked = isNew.length ? store.proofs(way, isNew).then((proofs) => showProofs(way, isNew, proofs)) : null;
  for (const id of isNew) state.proving[`${way} ${id}`] = asked;
  return Promise.all(steps.map((id) => state.proving[`${way} ${id}`]));
}

function showProofs(way, steps, proofs) {
  Object.assign(way === "proof" ? state.proofs : state.autograds, proofs);
  for (const element of document.querySelectorAll("[data-proof]")) {
    if (element.dataset.proof in proofs) fillBadge(element, element.dataset.proof);
  }
  for (const id of steps) markProven(id);
}
