// A heat map of a matrix. One cell is selected, by pointer or arrow keys, and its number is shown.

const GUTTER = { token: 44, vocabulary: 34, position: 24, feature: 24, depth: 86, parameter: 158 };
const TOP = 16;

class HeatMap {
  /** options: matrix, meta, label, selected {r, c}, onselect(r, c), onhover({r, c}) or onhover(null), maxHeight, scale, names */
  constructor(options) {
    Object.assign(this, options);
    this.finite = this.matrix.values.filter((x) => Number.isFinite(x));
    this.found = this.finite.reduce((a, x) => Math.max(a, Math.abs(x)), 0);
    this.largest = this.found && Math.max(this.found, this.scale || 0); // what is rounding beside the step's numbers is drawn as nearly 0
    this.signed = this.finite.some((x) => x < 0);
    this.selected = this.selected || { r: 0, c: 0 };
    this.hovered = null;
    this.build();
  }

  build() {
    const { matrix, label } = this;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.spacer = h("div", { class: "spacer" }, this.canvas);
    this.cell = h("div", { role: "gridcell", id: uniqueId("cell"), class: "visually-hidden" });
    this.scroller = h(
      "div",
      {
        class: "scroller",
        role: "grid",
        tabindex: "0",
        "aria-label": `${label}: ${matrix.rows} rows, ${matrix.cols} columns. Arrow keys move from cell to cell.`,
        "aria-rowcount": matrix.rows,
        "aria-colcount": matrix.cols,
        "aria-activedescendant": this.cell.id,
        onkeydown: (event) => this.key(event),
        onscroll: () => this.draw(),
        onpointermove: (event) => this.point(event),
        onpointerleave: () => this.leave(),
        onclick: (event) => this.click(event),
      },
      h("div", { role: "row", class: "visually-hidden" }, this.cell),
      this.spacer,
    );
    this.element = h("div", { class: "heat" }, this.scroller);
    new ResizeObserver(() => this.layout()).observe(this.element);
    this.describe();
  }

  layout() {
    const width = this.element.clientWidth;
    if (!width) return;
    const { matrix, meta } = this;
    const kind = meta.axes.length === 2 ? meta.axes[0] : "";
    this.narrow = width < 240;
    this.gutter = kind ? Math.min(this.narrow && kind === "token" ? 18 : GUTTER[kind] || 30, width * 0.4) : 0;
    const room = width - this.gutter - 2;
    const labelled = kind === "token" || kind === "vocabulary" || kind === "depth" || kind === "parameter";
    this.w = Math.max(Math.min(room / matrix.cols, 26), room < 420 ? 6 : 5);
    const maxHeight = this.maxHeight || 460;
    const square = meta.axes.length === 2 && meta.axes[0] === meta.axes[1];
    if (square) this.w = Math.min(this.w, Math.max(this.narrow ? 5 : 9, (maxHeight - TOP) / matrix.rows));
    this.h = square ? Math.max(this.w, labelled && !this.narrow ? 9 : 5) : Math.min(Math.max(this.w, labelled ? 12 : 6), 22);
    if (square) this.w = Math.max(this.w, this.h);
    if (meta.axes.length < 2) this.h = 26;
    if (kind && !square) this.h = Math.max(labelled ? 12 : 5, Math.min(this.h, (maxHeight - TOP) / matrix.rows));
    this.viewHeight = Math.min(TOP + matrix.rows * this.h, maxHeight);
    this.viewWidth = Math.min(width, this.gutter + matrix.cols * this.w + 2);
    this.spacer.style.width = `${this.gutter + matrix.cols * this.w}px`;
    this.spacer.style.height = `${TOP + matrix.rows * this.h}px`;
    const bar = this.gutter + matrix.cols * this.w > width + 1 ? 12 : 0;
    this.scroller.style.height = `${this.viewHeight + bar}px`;
    this.scroller.style.maxWidth = `${this.viewWidth + (TOP + matrix.rows * this.h > maxHeight ? 12 : 0)}px`;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.viewWidth * ratio);
    this.canvas.height = Math.round(this.viewHeight * ratio);
    this.canvas.style.width = `${this.viewWidth}px`;
    this.canvas.style.height = `${this.viewHeight}px`;
    this.reveal();
    this.draw();
  }

  draw() {
    if (!this.w) return;
    const { matrix, scroller } = this;
    const ratio = window.devicePixelRatio || 1;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.viewWidth, this.viewHeight);
    const left = scroller.scrollLeft;
    const top = scroller.scrollTop;
    const c0 = Math.floor(left / this.w);
    const c1 = Math.min(matrix.cols, Math.ceil((left + this.viewWidth - this.gutter) / this.w));
    const r0 = Math.floor(top / this.h);
    const r1 = Math.min(matrix.rows, Math.ceil((top + this.viewHeight - TOP) / this.h));
    context.save();
    context.beginPath();
    context.rect(this.gutter, TOP, this.viewWidth - this.gutter, this.viewHeight - TOP);
    context.clip();
    const gap = Math.min(this.w, this.h) >= 9 ? 1 : 0;
    const dot = cssVariable("muted");
    for (let r = r0; r < r1; r++) {
      for (let c = c0; c < c1; c++) this.drawCell(context, r, c, left, top, gap, dot);
    }
    context.restore();
    this.drawLabels(context, { c0, c1, r0, r1, left, top });
    if (this.hovered) this.outline(context, this.hovered, left, top, cssVariable("muted"), 1);
    this.outline(context, this.selected, left, top, cssVariable("ink"), 2);
  }

  drawCell(context, r, c, left, top, gap, dot) {
    const x = this.gutter + c * this.w - left;
    const y = TOP + r * this.h - top;
    const value = this.matrix.at(r, c);
    if (!Number.isFinite(value)) {
      context.fillStyle = cssVariable("line");
      context.fillRect(x, y, this.w - gap, this.h - gap);
      return;
    }
    context.fillStyle = this.names ? cssVariable("sunk") : colourOf(value, this.largest);
    context.fillRect(x, y, this.w - gap, this.h - gap);
    if (this.names) return this.drawName(context, String(value), x, y);
    if (value === 0 && Math.min(this.w, this.h) >= 7) {
      context.fillStyle = dot;
      context.globalAlpha = 0.55;
      context.fillRect(x + this.w / 2 - 1, y + this.h / 2 - 1, 1.5, 1.5);
      context.globalAlpha = 1;
    }
  }

  /** An id as text, where it fits. */
  drawName(context, text, x, y) {
    context.font = `10px ${cssVariable("mono")}`;
    if (context.measureText(text).width > this.w - 1) return;
    context.fillStyle = cssVariable("ink");
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, x + this.w / 2, y + this.h / 2);
  }

  drawLabels(context, { c0, c1, r0, r1, left, top }) {
    context.font = `11px ${cssVariable("mono")}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    if (this.gutter) {
      const every = Math.ceil(11 / this.h);
      for (let r = r0; r < r1; r++) {
        const y = TOP + (r + 0.5) * this.h - top;
        const crowded = r !== this.selected.r && Math.abs(r - this.selected.r) < every; // the label of the selected row has the place
        if (y < TOP + 3 || crowded || (r % every && r !== this.selected.r)) continue;
        context.fillStyle = cssVariable(r === this.selected.r ? "ink" : "muted");
        context.fillText(this.rowLabel(r), this.gutter - 5, y, this.gutter - 6);
      }
    }
    context.textAlign = "center";
    this.drawColumnLabels(context, c0, c1, left);
  }

  /** Draws as many labels as fit, always including that of the selected column. */
  drawColumnLabels(context, c0, c1, left) {
    const numbered = this.meta.axes[this.meta.axes.length - 1] === "feature";
    const sample = [c0, Math.floor((c0 + c1) / 2), c1 - 1, this.selected.c];
    const widest = Math.max(...sample.map((c) => context.measureText(this.columnLabel(c)).width)) + 4;
    const needed = Math.ceil(widest / this.w);
    const every = numbered ? 8 * Math.ceil(needed / 8) : needed;
    for (let c = c0; c < c1; c++) {
      const chosen = c === this.selected.c;
      const crowded = Math.abs(c - this.selected.c) < needed;
      if (!chosen && (c % every || crowded)) continue;
      const x = this.gutter + (c + 0.5) * this.w - left;
      if (x < this.gutter) continue;
      context.fillStyle = cssVariable(chosen ? "ink" : "muted");
      const half = context.measureText(this.columnLabel(c)).width / 2;
      context.fillText(this.columnLabel(c), Math.min(x, this.viewWidth - half - 1), TOP / 2);
    }
  }

  rowLabel(r) {
    const { meta } = this;
    if (meta.row_labels) return meta.row_labels[r];
    const at = meta.rows ? meta.rows[r] : r;
    if (meta.axes[0] === "token") return this.narrow ? tokenLabel(at) : `${at} ${tokenLabel(at)}`;
    if (meta.axes[0] === "vocabulary") return short(state.doc.vocabulary[at], 5);
    return String(at);
  }

  columnLabel(c) {
    const axis = this.meta.axes[this.meta.axes.length - 1];
    const at = this.meta.columns ? this.meta.columns[c] : c;
    if (axis === "token") return tokenLabel(at);
    if (axis === "vocabulary") return short(state.doc.vocabulary[at], 5);
    return String(at);
  }

  outline(context, { r, c }, left, top, colour, width) {
    const x = this.gutter + c * this.w - left;
    const y = TOP + r * this.h - top;
    if (x + this.w < this.gutter || y + this.h < TOP) return;
    context.lineWidth = width + 2;
    context.strokeStyle = cssVariable("ground");
    context.strokeRect(x - 1, y - 1, this.w + 1, this.h + 1);
    context.lineWidth = width;
    context.strokeStyle = colour;
    context.strokeRect(x - 1, y - 1, this.w + 1, this.h + 1);
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const c = Math.floor((event.clientX - box.left - this.gutter + this.scroller.scrollLeft) / this.w);
    const r = Math.floor((event.clientY - box.top - TOP + this.scroller.scrollTop) / this.h);
    const inside = event.clientX - box.left >= this.gutter && event.clientY - box.top >= TOP;
    return inside && r >= 0 && c >= 0 && r < this.matrix.rows && c < this.matrix.cols ? { r, c } : null;
  }

  point(event) {
    const cell = this.cellAt(event);
    if (cell && this.hovered && cell.r === this.hovered.r && cell.c === this.hovered.c) {
      tooltip.move(event);
      return;
    }
    this.setHover(cell);
    if (this.onhover) this.onhover(cell);
    if (cell) tooltip.show(event, [math(this.label), `[${cellLabel(this.meta, cell.r, cell.c)}]`], exact(this.matrix.at(cell.r, cell.c)));
    else tooltip.hide();
  }

  leave() {
    this.setHover(null);
    if (this.onhover) this.onhover(null);
    tooltip.hide();
  }

  setHover(cell) {
    this.hovered = cell && cell.r < this.matrix.rows && cell.c < this.matrix.cols ? cell : null;
    this.draw();
  }

  click(event) {
    const cell = this.cellAt(event);
    if (cell) this.choose(cell.r, cell.c);
  }

  key(event) {
    const { r, c } = this.selected;
    const { rows, cols } = this.matrix;
    const moves = {
      ArrowUp: [r - 1, c],
      ArrowDown: [r + 1, c],
      ArrowLeft: [r, c - 1],
      ArrowRight: [r, c + 1],
      Home: [event.ctrlKey ? 0 : r, 0],
      End: [event.ctrlKey ? rows - 1 : r, cols - 1],
      PageUp: [r - 10, c],
      PageDown: [r + 10, c],
    };
    if (!(event.key in moves) || event.altKey || event.metaKey) return;
    event.preventDefault();
    const [to, column] = moves[event.key];
    this.choose(Math.min(Math.max(to, 0), rows - 1), Math.min(Math.max(column, 0), cols - 1));
  }

  choose(r, c) {
    this.select(r, c);
    if (this.onselect) this.onselect(r, c);
  }

  /** Selects a cell without calling onselect. */
  select(r, c) {
    this.selected = { r: Math.min(r, this.matrix.rows - 1), c: Math.min(c, this.matrix.cols - 1) };
    this.describe();
    this.reveal();
    this.draw();
  }

  describe() {
    const { r, c } = this.selected;
    this.cell.setAttribute("aria-rowindex", r + 1);
    this.cell.setAttribute("aria-colindex", c + 1);
    this.cell.textContent = `${cellLabel(this.meta, r, c)}: ${exact(this.matrix.at(r, c))}`;
  }

  /** Scrolls the heat map until the selected cell is visible. */
  reveal() {
    if (!this.w) return;
    const { scroller } = this;
    const x = this.selected.c * this.w;
    const y = this.selected.r * this.h;
    const width = this.viewWidth - this.gutter;
    const height = this.viewHeight - TOP;
    if (x < scroller.scrollLeft) scroller.scrollLeft = x;
    else if (x + this.w > scroller.scrollLeft + width) scroller.scrollLeft = x + this.w - width;
    if (y < scroller.scrollTop) scroller.scrollTop = y;
    else if (y + this.h > scroller.scrollTop + height) scroller.scrollTop = y + this.h - height;
  }
}

const tokenLabel = (t) => (t in state.doc.tokens ? short(state.doc.tokens[t].text, 5) : "");

let lastId = 0;
const uniqueId = (name) => `${name}-${++lastId}`;

/** Shows the number under the pointer. */
const tooltip = {
  show(event, label, number) {
    if (!this.element) document.body.append((this.element = h("div", { class: "tooltip", "aria-hidden": "true" })));
    this.element.replaceChildren(h("span", {}, label), h("b", {}, number));
    this.element.hidden = false;
    this.move(event);
  },
  move(event) {
    const box = this.element.getBoundingClientRect();
    const x = Math.min(event.clientX + 14, document.documentElement.clientWidth - box.width - 8);
    const y = event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18;
    this.element.style.transform = `translate(${Math.max(x, 4)}px, ${y}px)`;
  },
  hide() {
    if (this.element) this.element.hidden = true;
  },
};
