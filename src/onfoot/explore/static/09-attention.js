// Every head: its attention weights, and the gradient of its scores.

async function drawAttention() {
  const { model } = state.doc;
  const delta = model.causal ? "Δ_causal" : "Δ_scaled";
  const root = h(
    "article",
    { class: "view attention" },
    h("h2", {}, "Attention, forward and backward"),
    h(
      "p",
      { class: "lead" },
      "Left: the attention weights ",
      math("ρ"),
      "; each row shows what one token attends to, and sums to 1. Right: ",
      math(delta),
      ", the gradient of the scores: the loss falls if blue (negative) cells rise and orange (positive) cells fall.",
    ),
    h("p", { class: "lead formula-line" }, math(store.meta(`0.0.${delta}`).formula)),
    h(
      "ul",
      { class: "lead points" },
      h("li", {}, "Each row of ", math(delta), " sums to 0: a row of weights sums to 1, so what one weight gains the others lose.", !isLlama() && [" That is why ", math("∂b_k"), " is 0."]),
      model.causal && h("li", {}, "Above the diagonal both are exactly 0, marked by dots: no token attends to a later one, so no gradient flows back to it."),
      isLlama() && model.key_heads < model.heads && h("li", {}, `${model.heads} query heads read ${model.key_heads} key heads: heads that share keys and values add their gradients there.`),
      model.causal && h("li", {}, "Row 0 of ", math(delta), " is exactly 0: token 0 attends only to itself, so its weight is always 1."),
    ),
  );
  const linked = new Linked(await attendedCell(delta));
  const many = model.blocks * model.heads > MANY_HEADS;
  for (let b = 0; b < model.blocks; b++) root.append(many ? closedBlock(b, linked, delta) : blockOfHeads(b, linked, delta));
  return root;
}

/** The chosen token's row, at the score with the largest gradient, or what it attends to most where there is none. */
async function attendedCell(delta) {
  const r = state.token;
  const lines = [await store.line(`0.0.${delta}`, "row", r), await store.line("0.0.ρ", "row", r)];
  const line = lines[0].some((x) => x !== 0) ? lines[0] : lines[1];
  return { r, c: line.reduce((best, x, i) => (Math.abs(x) > Math.abs(line[best]) ? i : best), 0) };
}

const WIDE_SCREEN = 1600; // pixels; from there on matrices are larger
const MANY_HEADS = 64; // more are drawn block by block, when they are opened

function blockOfHeads(b, linked, delta) {
  return h("section", { class: "block" }, h("h3", {}, `Block ${b + 1}`), headCards(b, linked, delta));
}

function headCards(b, linked, delta) {
  return h("div", { class: "head-cards" }, Array.from({ length: state.doc.model.heads }, (_, head) => headCard(b, head, linked, delta)));
}

/** A block of a large model: its heads are loaded when it is opened. */
function closedBlock(b, linked, delta) {
  const details = h("details", { class: "block inside", data: { block: b } }, h("summary", {}, h("h3", {}, `Block ${b + 1}`)));
  details.addEventListener("toggle", () => {
    if (details.open && !details.querySelector(".head-cards")) details.append(headCards(b, linked, delta));
  });
  if (b === 0) details.open = true;
  return details;
}

function headCard(b, head, linked, delta) {
  const names = [`${b}.${head}.ρ`, `${b}.${head}.${delta}`];
  const figures = names.map((id) => new Figure({ id, linked, terms: false, plain: true, maxHeight: innerWidth < WIDE_SCREEN ? 300 : 460 }));
  const facts = h("p", { class: "head-facts" });
  Promise.all(names.map((id) => store.matrix(id))).then(([rho, gradient]) => facts.append(...headFacts(rho, gradient, delta)));
  return h(
    "section",
    { class: "head-card", data: { head: `${b}.${head}` } },
    h("h4", {}, `Head ${head + 1} `, h("button", { class: "quiet small", type: "button", onclick: () => openHead(b, head) }, "open in the map")),
    h("div", { class: "pair tight" }, figures.map((figure) => figure.element)),
    facts,
  );
}

/** The properties that every head must have, measured. */
function headFacts(rho, gradient, delta) {
  const sums = (m) => Array.from({ length: m.rows }, (_, r) => m.values.subarray(r * m.cols, (r + 1) * m.cols).reduce((a, x) => a + x, 0));
  const off = (values, to) => Math.max(...values.map((x) => Math.abs(x - to)));
  const [one, zero] = [off(sums(rho), 1), off(sums(gradient), 0)];
  const facts = [
    h("span", { data: { fact: "rho-sum", value: String(one) } }, "rows of ", math("ρ"), " sum to 1 ± ", h("b", {}, tiny(one))),
    h("span", { data: { fact: "delta-sum", value: String(zero) } }, "rows of ", math(delta), " sum to 0 ± ", h("b", {}, tiny(zero))),
  ];
  if (!state.doc.model.causal) return facts;
  let zeros = 0;
  let above = 0;
  for (let r = 0; r < rho.rows; r++) {
    for (let c = r + 1; c < rho.cols; c++) {
      above++;
      if (rho.at(r, c) === 0 && gradient.at(r, c) === 0) zeros++;
    }
  }
  const first = gradient.values.subarray(0, gradient.cols).every((x) => x === 0);
  facts.push(h("span", { data: { fact: "causal-zeros", value: String(zeros) } }, h("b", {}, `${zeros} of ${above}`), " masked cells exactly 0"));
  facts.push(h("span", { data: { fact: "first-row", value: String(first) } }, `row 0 ${first ? "exactly 0" : "not 0"}`));
  return facts;
}

function openHead(b, head) {
  state.head = head;
  state.openBlocks.add(b);
  state.openHeads.add(b);
  state.step = `${b}.${head}.rho`;
  setView("map");
}
