// The user's own pairs: each gradient beside the right one, with the first wrong one marked.

async function drawOwn() {
  const found = await store.work("own");
  const compared = h("div", { class: "compared", "aria-live": "polite" });
  const view = h(
    "article",
    { class: "view own" },
    h("h2", {}, "Your gradients"),
    h("p", { class: "lead" }, `The same network and text, run on the pairs of ${found.name}. ${found.counted}.`),
    h("p", { class: "verdict" }, ownVerdict(found)),
    h("div", { class: "own-columns" }, h("div", {}, pairTable(found.pairs), found.runs && ownTable(found, compared)), compared),
  );
  const first = found.rows.find((row) => ownId(row) === state.ownRow) || found.rows.find((row) => row.wrong && row.arrays.right) || found.rows[0];
  if (first) requestAnimationFrame(() => chooseOwn(first, compared));
  return view;
}

function ownVerdict(found) {
  if (!found.runs) return [h("b", { data: { wrong: "all" } }, "The network does not run"), `: ${found.message}.`];
  const wrong = found.rows.filter((row) => row.wrong);
  if (!wrong.length) {
    const moved = found.first ? [" With other weights one is wrong: ", h("b", { data: { first: found.first } }, found.first), "."] : "";
    return [h("b", { data: { wrong: 0 } }, `All ${found.rows.length} gradients are right`), ".", moved];
  }
  const step = stepOf(ownId(wrong[0]));
  return [
    h("b", { data: { wrong: wrong.length } }, `${wrong.length} of ${found.rows.length}`),
    " gradients are wrong. The first in the backward pass is ",
    h("b", {}, rowName(wrong[0])),
    found.first && [": ", h("span", { data: { first: found.first } }, found.first)],
    ". ",
    step && h("button", { type: "button", class: "quiet small", onclick: () => openStep(step) }, "Open this step"),
  ];
}

const ownId = (row) => (row.block === null || row.parameter ? row.name : `${row.block}.${row.name}`);

function noteOwn(row) {
  state.ownRow = ownId(row);
  pushHash();
}

function openStep(step) {
  state.step = step;
  setView("map");
}

function pairTable(pairs) {
  const line = (one) =>
    h(
      "tr",
      { class: one.wrong ? "wrong" : "right", data: { pair: one.pair, yours: String(one.yours), wrong: String(one.wrong) } },
      h("th", { scope: "row" }, h("code", {}, one.pair)),
      h("td", {}, one.yours ? "yours" : "onfoot’s"),
      h("td", {}, one.words),
      h("td", {}, one.wrong ? "✗" : "✓"),
    );
  return h("table", { class: "figures-table errors" }, h("caption", {}, "The pairs that this network calls"), h("tbody", {}, pairs.map(line)));
}

function ownTable(found, compared) {
  const first = found.rows.findIndex((row) => row.wrong);
  const rows = found.rows.map((row, i) => {
    const element = errorRow(row, i === first);
    const heading = element.querySelector("th");
    heading.replaceChildren(h("button", { type: "button", class: "quiet", onclick: () => noteOwn(row) || chooseOwn(row, compared) }, rowName(row)));
    return element;
  });
  return h(
    "div",
    { class: "table-scroll" },
    h("table", { class: "figures-table errors own-errors" }, h("caption", {}, "Relative error of every gradient, from the loss down to the embedding; choose one to see both"), h("tbody", {}, rows)),
  );
}

/** Shows the right gradient, the user's and their difference, with one selected cell: at first, that of the largest error. */
async function chooseOwn(row, compared) {
  for (const element of document.querySelectorAll(".own-errors tr")) element.removeAttribute("aria-current");
  const chosen = [...document.querySelectorAll(".own-errors tr")].find((element) => element.dataset.gradient === ownId(row));
  if (chosen) chosen.setAttribute("aria-current", "true");
  if (!row.arrays.right) {
    compared.replaceChildren(h("h3", {}, rowName(row)), h("p", {}, row.problem));
    return;
  }
  const difference = await store.matrix(row.arrays["yours − right"]);
  const at = difference.values.reduce((best, x, i) => (Math.abs(x) > Math.abs(difference.values[best]) ? i : best), 0);
  const linked = new Linked({ r: Math.floor(at / difference.cols), c: at % difference.cols });
  const figures = Object.values(row.arrays).map((id) => new Figure({ id, linked, terms: false, plain: true, maxHeight: 300 }));
  compared.replaceChildren(h("h3", {}, rowName(row)), ...figures.map((figure) => figure.element));
  await Promise.all(figures.map((figure) => figure.ready));
  compared.dataset.row = ownId(row);
}
