// Wide arrays by overview and zoom: a coarse map of blocks, and below it a window of cells that moves with the selection.

const WIDE = 512; // columns; wider arrays are shown this way
const MANY_ROWS = 1024;
const BLOCKS = { rows: 48, columns: 96 }; // of an overview, at most
const WINDOW = { rows: 32, columns: 64 };

function isWide(meta) {
  const columns = meta.shape[meta.shape.length - 1] || 1;
  return columns >= WIDE || (meta.shape.length === 2 && meta.shape[0] >= MANY_ROWS);
}

/** The blocks of an array, as the server computes them, for an exported page that has all its numbers. */
function overviewOf(matrix) {
  const edges = (n, most) => Array.from({ length: Math.min(n, most) }, (_, i) => Math.floor((i * n) / Math.min(n, most)));
  const [rows, columns] = [edges(matrix.rows, BLOCKS.rows), edges(matrix.cols, BLOCKS.columns)];
  const largest = new Float64Array(rows.length * columns.length);
  const mean = new Float64Array(largest.length);
  rows.forEach((r0, i) => {
    columns.forEach((c0, j) => {
      const [r1, c1] = [rows[i + 1] || matrix.rows, columns[j + 1] || matrix.cols];
      const at = i * columns.length + j;
      for (let r = r0; r < r1; r++) {
        for (let c = c0; c < c1; c++) {
          const x = matrix.at(r, c);
          if (Math.abs(x) > Math.abs(largest[at])) largest[at] = x;
          mean[at] += x / ((r1 - r0) * (c1 - c0));
        }
      }
    });
  });
  return { rows, columns, largest, mean };
}

const numbers = (x) => (typeof x === "string" ? decoded(x) : x);

/** The window of `size` entries around an index, within an axis of n. */
function windowAround(index, size, n) {
  const begin = Math.max(0, Math.min(index - Math.floor(size / 2), n - size));
  return [begin, Math.min(begin + size, n)];
}

/** Shows a wide array in a figure. */
async function showWide(figure) {
  figure.wide = new WideArray(figure);
  await figure.wide.show();
}

class WideArray {
  constructor(figure) {
    this.figure = figure;
    this.meta = figure.meta;
    this.rows = this.meta.shape.length === 2 ? this.meta.shape[0] : 1;
    this.columns = this.meta.shape[this.meta.shape.length - 1] || 1;
    this.kind = "largest";
    this.coarseBox = h("div", { class: "coarse" });
    this.fineBox = h("div", { class: "fine" });
    this.range = h("p", { class: "aside window-range", "aria-live": "polite" });
  }

  async show() {
    const { figure } = this;
    const embedded = !store.served && !leftOut(figure.id);
    this.overview = embedded ? overviewOf(await store.matrix(figure.id)) : await store.part("overview", { id: figure.id });
    const choice = h(
      "label",
      { class: "aside" },
      "Overview: each cell is a block of ",
      `${Math.ceil(this.rows / this.overview.rows.length)} × ${Math.ceil(this.columns / this.overview.columns.length)} numbers, its `,
      h("select", { onchange: (event) => this.drawCoarse(event.target.value) }, h("option", { value: "largest" }, "largest entry"), h("option", { value: "mean" }, "mean")),
    );
    figure.plot.replaceChildren(choice, this.coarseBox, this.range, this.fineBox);
    this.cell = { r: Math.min(figure.linked.cell.r, this.rows - 1), c: Math.min(figure.linked.cell.c, this.columns - 1) };
    this.drawCoarse("largest");
    await this.zoom();
  }

  drawCoarse(kind) {
    const { rows, columns } = this.overview;
    const shape = [rows.length, columns.length];
    const matrix = new Matrix(numbers(this.overview[kind]), shape);
    const meta = { ...this.meta, shape, axes: this.meta.axes.length === 2 ? this.meta.axes : ["feature", ...this.meta.axes] };
    meta.rows = this.labels(rows, this.meta.rows);
    meta.columns = this.labels(columns, this.meta.columns);
    delete meta.row_labels;
    const map = new HeatMap({
      matrix,
      meta,
      label: `${this.meta.symbol}, ${kind === "mean" ? "means" : "largest entries"} of blocks`,
      maxHeight: 320,
      selected: this.block(),
      onselect: (r, c) => this.figure.linked.choose(rows[r], columns[c]),
    });
    this.coarse = map;
    this.coarseBox.replaceChildren(map.element, legend(map.largest, map.signed));
  }

  /** The indices to show for positions along an axis. */
  labels(positions, own) {
    return positions.map((at) => (own ? own[at] : at));
  }

  /** The block of the selected cell. */
  block() {
    const last = (edges, at) => edges.filter((edge) => edge <= at).length - 1;
    return { r: last(this.overview.rows, this.cell.r), c: last(this.overview.columns, this.cell.c) };
  }

  select(r, c) {
    this.cell = { r: Math.min(r, this.rows - 1), c: Math.min(c, this.columns - 1) };
    if (!this.coarse) return;
    const block = this.block();
    this.coarse.select(block.r, block.c);
    this.figure.pending = this.zoom();
  }

  async zoom() {
    const { figure, cell } = this;
    if (leftOut(figure.id)) {
      this.range.textContent = `The ${times(this.meta.shape)} numbers were left out of this exported page; run onfoot explore to see them.`;
      return;
    }
    const [r0, r1] = windowAround(cell.r, WINDOW.rows, this.rows);
    const [c0, c1] = windowAround(cell.c, WINDOW.columns, this.columns);
    const inside = this.shown && cell.r >= this.shown.r0 && cell.r < this.shown.r1 && cell.c >= this.shown.c0 && cell.c < this.shown.c1;
    if (!inside) {
      const matrix = await this.window(r0, r1, c0, c1);
      if (this.cell !== cell) return; // another cell was chosen meanwhile
      this.shown = { r0, r1, c0, c1 };
      this.drawFine(matrix);
    } else figure.map.select(cell.r - this.shown.r0, cell.c - this.shown.c0);
    await this.explain();
  }

  async window(r0, r1, c0, c1) {
    const shape = [r1 - r0, c1 - c0];
    if (store.served) return new Matrix(decoded((await store.part("window", { id: this.figure.id, r0, r1, c0, c1 })).values), shape);
    const all = await store.matrix(this.figure.id);
    return new Matrix(Float64Array.from({ length: shape[0] * shape[1] }, (_, i) => all.at(r0 + Math.floor(i / shape[1]), c0 + (i % shape[1]))), shape);
  }

  drawFine(matrix) {
    const { figure, meta } = this;
    const { r0, r1, c0, c1 } = this.shown;
    const count = (from, to) => Array.from({ length: to - from }, (_, i) => from + i);
    const part = { ...meta, shape: matrix.shape, columns: this.labels(count(c0, c1), meta.columns) };
    if (meta.axes.length === 2) part.rows = this.labels(count(r0, r1), meta.rows);
    else part.shape = [c1 - c0];
    figure.map = new HeatMap({
      matrix,
      meta: part,
      label: meta.symbol,
      maxHeight: figure.maxHeight,
      selected: { r: this.cell.r - r0, c: this.cell.c - c0 },
      onselect: (r, c) => figure.linked.choose(r0 + r, c0 + c),
      onhover: () => undefined,
    });
    const rows = meta.axes.length === 2 ? `rows ${r0} to ${r1 - 1} of ${grouped(this.rows)}, ` : "";
    this.range.textContent = `Zoom: ${rows}columns ${c0} to ${c1 - 1} of ${grouped(this.columns)}`;
    this.fineBox.replaceChildren(figure.map.element, legend(figure.map.largest, figure.map.signed));
  }

  async explain() {
    const { figure, cell, meta } = this;
    if (figure.terms === false) {
      const value = figure.map.matrix.at(cell.r - this.shown.r0, cell.c - this.shown.c0);
      const label = h("span", { class: "at" }, `[${cellLabel(meta, cell.r, cell.c)}]`);
      figure.answer.replaceChildren(h("p", { class: "number" }, math(meta.symbol), label, " = ", h("output", { class: "value", data: { value: String(value) } }, exact(value))));
      return;
    }
    const shown = await explained(figure.id, cell.r, cell.c);
    if (this.cell === cell) figure.answer.replaceChildren(shown);
  }
}

/** The explanation of a number, or why there is none: an exported page may lack an array that it needs. */
async function explained(id, r, c) {
  const needed = (store.meta(id).terms || []).flatMap((term) => term.factors.map((factor) => factor.tensor));
  const missing = needed.filter(leftOut);
  if (!missing.length) return explanation(id, r, c);
  const value = await store.cell(id, r, c);
  const symbols = [...new Set(missing.map((one) => store.meta(one).symbol))];
  return h(
    "div",
    { class: "explanation", data: { tensor: id, r, c } },
    h("p", { class: "number" }, math(store.meta(id).symbol), h("span", { class: "at" }, `[${cellLabel(store.meta(id), r, c)}]`), " = ", h("output", { class: "value", data: { value: String(value) } }, exact(value))),
    h("p", { class: "aside" }, "Its terms need ", symbols.map((symbol, i) => [i ? ", " : "", math(symbol)]), ", left out of this exported page; run onfoot explore to see them."),
  );
}
