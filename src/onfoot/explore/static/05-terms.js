// Explains a number: splits a cell into its terms and checks that they add up.

const MAX_PRODUCTS = 6; // of a long sum that are shown individually
const ROUNDING = 1e-12; // allowed error of the sum, relative to its largest term

/** The value of a factor at a cell: a number, or a row or column of numbers if it is indexed by j. */
async function factorAt(factor, r, c) {
  const { tensor, at } = factor;
  const column = c + (factor.shift || 0);
  const index = { r, c: column };
  if (!at.includes("j")) {
    const row = at.length === 2 ? index[at[0]] : 0;
    const cell = at.length === 0 ? [0, 0] : [row, index[at[at.length - 1]]];
    return { number: raised(await store.cell(tensor, ...cell), factor), cell };
  }
  if (at === "j") return { line: await store.line(tensor, "row", 0) };
  const other = index[at[0] === "j" ? at[1] : at[0]];
  const line = await store.line(tensor, at[0] === "j" ? "column" : "row", other);
  return { line, cell: (j) => (at[0] === "j" ? [j, other] : [other, j]) };
}

const raised = (x, factor) => (factor.power === -1 ? 1 / x : x);

/** The value of a term at a cell, and the products if it is a sum. */
async function termAt(term, r, c) {
  const sign = term.sign || 1;
  const parts = await Promise.all(term.factors.map((factor) => factorAt(factor, r, c)));
  if (!term.over) return { value: sign * parts.reduce((a, part) => a * part.number, 1), parts };
  const length = parts.find((part) => part.line).line.length;
  const products = Array.from({ length }, (_, j) => sign * parts.reduce((a, p) => a * (p.line ? p.line[j] : p.number), 1));
  return { value: products.reduce((a, b) => a + b, 0), parts, products };
}

/** A cell, its terms and their sum. */
async function explain(id, r, c) {
  const meta = store.meta(id);
  const cell = await store.cell(id, r, c);
  const terms = await Promise.all((meta.terms || []).map((term) => termAt(term, r, c)));
  const sum = terms.reduce((a, term) => a + term.value, 0);
  const scale = Math.max(...terms.flatMap((t) => (t.products || [t.value]).map(Math.abs)), Math.abs(cell), 1e-300);
  return { meta, cell, terms, sum, scale, error: Math.abs(sum - cell), right: Math.abs(sum - cell) <= ROUNDING * scale };
}

/** The element that shows them. */
async function explanation(id, r, c) {
  const { meta, cell, terms, sum, scale, error, right } = await explain(id, r, c);
  const name = h("span", { class: "cell-name" }, math(meta.symbol), h("span", { class: "at" }, `[${cellLabel(meta, r, c)}]`));
  const head = h("p", { class: "number" }, name, " = ", h("output", { class: "value", data: { value: String(cell) } }, exact(cell)));
  const box = h("div", { class: "explanation", data: { tensor: id, r, c } }, head);
  if (!Number.isFinite(cell)) {
    box.append(h("p", { class: "aside" }, "Masked: this token comes later, so its weight is exactly 0."));
    return box;
  }
  if (!terms.length) return box;
  const largest = Math.max(...terms.map((term) => Math.abs(term.value)), STEP_ROUNDING * scale); // what rounding leaves of large products is no full bar
  const rows = terms.map((term, i) => termItem(meta.terms[i], term, largest));
  box.append(h("div", { class: "terms", role: "list", "aria-label": "The terms of this number" }, rows));
  if (terms.length > 1 || terms[0].products) {
    box.append(
      h(
        "p",
        { class: `sum ${right ? "good" : "bad"}`, data: { sum: String(sum), right: String(right) } },
        h("span", { class: "sum-label" }, terms.length > 1 ? `Σ of ${terms.length} terms` : "Σ"),
        h("span", { class: "sum-value" }, exact(sum)),
        h("span", { class: "tick" }, right ? "✓ equals the cell" : "✗ differs from the cell", error ? ` (± ${tiny(error)})` : " exactly"),
      ),
    );
  }
  return box;
}

/** A term with its bar and value, and what it is a product or sum of. */
function termItem(term, found, largest) {
  const sign = (term.sign || 1) < 0 ? MINUS : "";
  const alone = !found.products && term.factors.length === 1 && (term.factors[0].power || 1) === 1;
  const row = h(
    "div",
    { class: "term", data: { value: String(found.value) } },
    h("span", { class: "term-label" }, sign && h("span", { class: "sign" }, `${sign} `), alone ? factorLink(term.factors[0].tensor, ...found.parts[0].cell, term.label) : math(term.label)),
    bar(found.value, largest),
    h("span", { class: "term-value", tabindex: "0", title: exact(found.value) }, `= ${brief(found.value, 6)}`),
  );
  const parts = found.products ? products(term, found) : h("p", { class: "factors" }, term.factors.map((factor, i) => factorText(factor, found.parts[i], i)));
  return h("div", { role: "listitem" }, row, !alone && parts);
}

/** A factor with its number; linked if it is on the map. */
function factorText(factor, part, i) {
  const divided = factor.power === -1;
  const number = divided ? 1 / part.number : part.number;
  const joint = i === 0 && !divided ? "" : divided ? (i === 0 ? "1 / " : " / ") : " × ";
  return [joint, h("span", { class: "together" }, factorLink(factor.tensor, ...part.cell), h("span", { class: "small-number" }, brief(number, 5)))];
}

function factorLink(id, r, c, label) {
  const step = stepOf(id);
  const symbol = math(label || store.meta(id).symbol);
  if (!step) return h("span", { class: "factor" }, symbol);
  return h("button", { class: "factor go", title: "Go to this number", onclick: () => goTo(step, id, r, c) }, symbol);
}

function products(term, found) {
  const order = found.products.map((value, j) => [Math.abs(value), j]).sort((a, b) => b[0] - a[0] || a[1] - b[1]);
  const shown = order.filter(([size]) => size > 0).slice(0, MAX_PRODUCTS);
  const rest = order.slice(shown.length);
  const left = rest.reduce((a, [, j]) => a + found.products[j], 0);
  const largest = shown.length ? shown[0][0] : 0;
  const lines = shown.map(([, j]) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, overName(term, j)),
      h("td", { class: "of" }, h("span", { class: "product" }, term.factors.map((factor, i) => productFactor(factor, found.parts[i], i, j)))),
      h("td", { class: "bar-cell" }, bar(found.products[j], largest)),
      h("td", { class: "num" }, signed(found.products[j], 5)),
    ),
  );
  if (rest.some(([size]) => size > 0)) {
    lines.push(h("tr", { class: "rest" }, h("th", { scope: "row" }, `${rest.length} more`), h("td"), h("td", { class: "bar-cell" }), h("td", { class: "num" }, signed(left, 5))));
  }
  const over = { tokens: "token", features: "feature", vocabulary: "vocabulary token" }[term.over];
  return h(
    "details",
    { class: "products", open: true },
    h("summary", {}, `a sum over ${plural(found.products.length, over, over === "feature" ? "features" : over.replace("token", "tokens"))}`),
    h("table", {}, h("tbody", {}, lines)),
  );
}

function productFactor(factor, part, i, j) {
  const number = part.line ? part.line[j] : part.number;
  const cell = part.line ? part.cell && part.cell(j) : part.cell;
  const symbol = cell ? factorLink(factor.tensor, ...cell) : math(store.meta(factor.tensor).symbol);
  return [i > 0 && h("span", { class: "times" }, "×"), h("span", { class: "together" }, symbol, h("span", { class: "small-number" }, brief(number, 4)))];
}

function overName(term, j) {
  if (term.over === "tokens") return `${j} ${tokenText(j)}`;
  if (term.over === "vocabulary") {
    const { columns } = store.meta(term.factors[0].tensor); // only some tokens of a large vocabulary
    return quoted(state.doc.vocabulary[columns ? columns[j] : j]);
  }
  return String(j);
}

/** A number as a bar from the middle: to the right if positive, to the left if negative. */
function bar(value, largest) {
  const share = largest > 0 ? Math.min(Math.abs(value) / largest, 1) : 0;
  const inner = h("i", { class: value < 0 ? "minus" : "plus", style: { width: `${50 * share}%` } });
  return h("span", { class: "bar", "aria-hidden": "true" }, inner);
}
