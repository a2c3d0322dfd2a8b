// Applies a known mistake to the network: which gradients are wrong, and how the diagnosis finds it.

async function drawMistakes() {
  const listed = await store.work("mistakes");
  const keys = listed.groups.flatMap((group) => group.mistakes.map((one) => one.key));
  state.firstMistake = keys.find((key) => key.includes("γ outside")) || keys[0];
  state.mistake = keys.includes(state.mistake) ? state.mistake : state.firstMistake;
  const result = h("div", { class: "mistake-result", "aria-live": "polite" });
  const list = h(
    "div",
    { class: "mistake-list", role: "listbox", "aria-label": "Known mistakes", onkeydown: (event) => mistakeKey(event, keys, result) },
    listed.groups.map((group) =>
      h(
        "div",
        { role: "group", "aria-label": group.name },
        h("div", { class: "group-name", "aria-hidden": "true" }, group.name),
        group.mistakes.map((one) =>
          h("div", { class: "mistake", role: "option", tabindex: "-1", data: { key: one.key }, onclick: () => chooseMistake(one.key, result, true, pushHash) }, one.name),
        ),
      ),
    ),
  );
  const view = h(
    "article",
    { class: "view mistakes" },
    h("h2", {}, "Known mistakes"),
    h(
      "p",
      { class: "lead" },
      "Each mistake is applied to the backward pass of this network, on this text, wherever its layer occurs. With many of them the loss still falls, which is why they go unnoticed.",
    ),
    h("div", { class: "mistake-columns" }, list, result),
  );
  requestAnimationFrame(() => {
    chooseMistake(state.mistake, result);
    const chosen = list.querySelector("[aria-selected=true]");
    if (chosen) list.scrollTop += chosen.getBoundingClientRect().top - list.getBoundingClientRect().top - 80;
  });
  return view;
}

function mistakeKey(event, keys, result) {
  const at = keys.indexOf(state.mistake);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: keys.length - 1 }[event.key];
  if (to === undefined || !(to in keys)) return;
  event.preventDefault();
  chooseMistake(keys[to], result, true, writeHash);
}

async function chooseMistake(key, result, focus = false, note = null) {
  state.mistake = key;
  if (note) note();
  for (const option of document.querySelectorAll(".mistake")) {
    const chosen = option.dataset.key === key;
    option.setAttribute("aria-selected", String(chosen));
    option.tabIndex = chosen ? 0 : -1;
    if (chosen && focus) option.focus();
  }
  result.setAttribute("aria-busy", "true");
  let shown;
  try {
    shown = mistakeResult(await store.work("mistake", { key }));
  } catch (error) {
    shown = [failedNote(error, () => chooseMistake(key, result))];
  }
  if (state.mistake !== key || works.has("mistake")) return;
  result.replaceChildren(...shown);
  result.setAttribute("aria-busy", "false");
  result.dataset.key = key;
}

function mistakeResult(found) {
  const words = h(
    "div",
    { class: "words" },
    h("h3", {}, found.name),
    h("p", {}, found.explains),
    h(
      "dl",
      { class: "pairs prose" },
      found.equation_text && [h("dt", {}, "violates ", equationName(found.equation)), h("dd", {}, found.formula ? formula(found.formula) : found.equation_text, h("div", { class: "aside" }, equationOf(found.equation)))],
      h("dt", {}, "correct"),
      h("dd", {}, found.fix),
      found.errata && [h("dt", {}, "in the errata"), h("dd", {}, found.errata)],
    ),
    found.runs ? consequences(found) : h("p", { class: "verdict" }, `This mistake raises an error here: ${found.message}. It goes unnoticed only if the shapes happen to match.`),
    diagnosisOf(found.diagnosis),
  );
  return [words, found.runs && errorTable(found)].filter(Boolean);
}

const equationName = (id) => h("span", { class: "eq", tabindex: "0" }, `eq ${id}`);

/** Whose equation it is. */
const equationOf = (id) => (/^[A-Z]/.test(id) ? "an equation of onfoot’s own, derived in docs/equations" : `equation ${id} of ${GLOSSARY.paper}`);

function consequences(found) {
  const wrong = found.rows.filter((row) => row.wrong);
  const first = found.rows.findIndex((row) => row.wrong);
  const verdict = wrong.length
    ? [h("b", { data: { wrong: wrong.length } }, `${wrong.length} of ${found.rows.length}`), " gradients are wrong. The first in the backward pass is ", h("b", {}, rowName(found.rows[first])), "."]
    : [h("b", { data: { wrong: 0 } }, "No gradient changes here"), ": one short text does not reveal this mistake. The checker’s cases do."];
  const steps = found.loss_wrong !== null && wrong.length > 0;
  return h(
    "div",
    { class: "consequences" },
    h("p", { class: "verdict" }, verdict),
    steps &&
      h(
        "dl",
        { class: "pairs" },
        h("dt", {}, "cosine similarity to the correct gradient"),
        h("dd", { data: { figure: "cosine", value: String(found.cosine) } }, found.cosine.toFixed(6).replace("-", MINUS)),
        h("dt", {}, "loss before the step"),
        h("dd", {}, brief(state.doc.loss, 6)),
        h("dt", {}, "loss after a step with the mistake"),
        h("dd", { data: { figure: "loss-wrong", value: String(found.loss_wrong) } }, brief(found.loss_wrong, 6)),
        h("dt", {}, "loss after a correct step"),
        h("dd", {}, brief(found.loss_right, 6)),
      ),
  );
}

function errorTable(found) {
  const first = found.rows.findIndex((row) => row.wrong);
  return h(
    "div",
    { class: "table-scroll" },
    h(
      "table",
      { class: "figures-table errors" },
      h("caption", {}, "Relative error of every gradient, from the loss down to the embedding; the bars are logarithmic, from rounding error to 1"),
      h("tbody", {}, found.rows.map((row, i) => errorRow(row, i === first))),
    ),
  );
}

function rowName(row) {
  const prefix = row.block === null ? "" : `block ${row.block + 1} `;
  if (row.parameter) return h("code", {}, `∂ ${shortName(row.name)}`);
  const symbol = math(row.name);
  symbol.setAttribute("aria-label", row.name.replace("_", " ")); // it names a row and a choice
  return h("span", {}, prefix, symbol);
}

/** A row with its error as a logarithmic bar, from rounding error to 1. */
function errorRow(row, isFirst) {
  const size = row.error === null ? 1 : Math.min(Math.max((Math.log10(Math.max(row.error, 1e-17)) + 17) / 17, 0), 1);
  return h(
    "tr",
    { class: `${row.wrong ? "wrong" : "right"} ${isFirst ? "first" : ""}`, data: { gradient: row.parameter ? row.name : `${row.block === null ? "" : row.block + "."}${row.name}`, error: String(row.error) } },
    h("th", { scope: "row" }, rowName(row)),
    h("td", { class: "shares" }, h("span", { class: "length", "aria-hidden": "true" }, h("i", { style: { width: `${100 * size}%` } }))),
    h("td", { class: "num" }, row.problem || relativeError(row.error)),
    h("td", {}, row.wrong ? "✗" : "✓"),
  );
}

const relativeError = (x) => (x >= 0.01 ? x.toPrecision(2) : tiny(x));

function diagnosisOf(diagnosis) {
  const nearest = diagnosis.found && diagnosis.candidates.find((one) => one.residual > 0 && !diagnosis.findings.some((finding) => one.names.includes(finding.name)));
  return h(
    "section",
    { class: "diagnosis", data: { found: String(diagnosis.found) } },
    h("h4", {}, "How the diagnosis finds it"),
    h("p", {}, `The checker gets a function with this mistake and knows only its signature, ${diagnosis.signature}. It compares every gradient with the exact one on ${diagnosis.cases} cases: `, diagnosis.wrong.length ? h("b", {}, `${diagnosis.wrong.join(", ")} wrong`) : h("b", {}, "none wrong on ordinary cases"), ". Then it runs the known mistakes of that layer on the same data and looks for the one that reproduces the wrong numbers up to rounding."),
    diagnosis.findings.length > 0 &&
      h(
        "ul",
        { class: "findings" },
        diagnosis.findings.map((finding) => h("li", { data: { finding: finding.name } }, h("b", {}, `✓ ${finding.name}`), finding.value && ` (${finding.value})`, h("span", { class: "aside" }, ` explains ${finding.gradients.join(", ")}`))),
      ),
    nearest && h("p", { class: "aside" }, `Every other known mistake of this layer differs from these numbers by ${relativeError(nearest.residual)} or more.`),
    h("details", {}, h("summary", {}, "Report of onfoot check"), h("pre", { tabindex: "0" }, diagnosis.report)),
  );
}
