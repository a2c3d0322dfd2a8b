// A known mistake is put into the network: which gradients go wrong, and how the diagnosis finds it.

async function drawMistakes() {
  const listed = await store.part("mistakes");
  const keys = listed.groups.flatMap((group) => group.mistakes.map((one) => one.key));
  state.mistake = keys.includes(state.mistake) ? state.mistake : keys.find((key) => key.includes("γ outside")) || keys[0];
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
          h("div", { class: "mistake", role: "option", tabindex: "-1", data: { key: one.key }, onclick: () => chooseMistake(one.key, result, true) }, one.name),
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
      "Each is put into the backward pass of this network, on this text, wherever its layer occurs. Many still let the loss fall, which is why they go unnoticed.",
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
  chooseMistake(keys[to], result, true);
}

async function chooseMistake(key, result, focus = false) {
  state.mistake = key;
  for (const option of document.querySelectorAll(".mistake")) {
    const chosen = option.dataset.key === key;
    option.setAttribute("aria-selected", String(chosen));
    option.tabIndex = chosen ? 0 : -1;
    if (chosen && focus) option.focus();
  }
  result.setAttribute("aria-busy", "true");
  let shown;
  try {
    shown = mistakeResult(await store.part("mistake", { key }));
  } catch (error) {
    shown = [h("p", { class: "message" }, error.message)];
  }
  if (state.mistake !== key) return;
  result.replaceChildren(...shown);
  result.setAttribute("aria-busy", "false");
  result.dataset.key = key;
}

function mistakeResult(found) {
  const equation = found.equation ? `eq ${found.equation}` : "";
  const words = h(
    "div",
    { class: "words" },
    h("h3", {}, found.name),
    h("p", {}, found.explains),
    h(
      "dl",
      { class: "pairs prose" },
      found.equation_text && [h("dt", {}, `violates ${equation}`), h("dd", {}, found.equation_text)],
      h("dt", {}, "right is"),
      h("dd", {}, found.fix),
      found.errata && [h("dt", {}, "in the errata"), h("dd", {}, found.errata)],
    ),
    found.runs ? damage(found) : h("p", { class: "verdict" }, `It does not even run here: ${found.message}. It is silent only where the sizes happen to agree.`),
    diagnosisOf(found.diagnosis),
  );
  return [words, found.runs && errorTable(found)].filter(Boolean);
}

function damage(found) {
  const wrong = found.rows.filter((row) => row.wrong);
  const first = found.rows.findIndex((row) => row.wrong);
  const verdict = wrong.length
    ? [h("b", { data: { wrong: wrong.length } }, `${wrong.length} of ${found.rows.length}`), " gradients are wrong. On the way down the first is ", h("b", {}, rowName(found.rows[first])), "."]
    : [h("b", { data: { wrong: 0 } }, "No gradient changes here"), ": with one short text, this mistake cannot be seen. The checker’s cases are made so that it can."];
  const steps = found.loss_wrong !== null && wrong.length > 0;
  return h(
    "div",
    { class: "damage" },
    h("p", { class: "verdict" }, verdict),
    steps &&
      h(
        "dl",
        { class: "pairs" },
        h("dt", {}, "cosine to the right gradient"),
        h("dd", { data: { figure: "cosine", value: String(found.cosine) } }, found.cosine.toFixed(6).replace("-", MINUS)),
        h("dt", {}, "loss now"),
        h("dd", {}, brief(state.doc.loss, 6)),
        h("dt", {}, "after a step with it"),
        h("dd", { data: { figure: "loss-wrong", value: String(found.loss_wrong) } }, brief(found.loss_wrong, 6)),
        h("dt", {}, "after a right step"),
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
      h("caption", {}, "Every gradient, from the loss down to the embedding, with its relative error; the bars are logarithmic, from rounding to 1"),
      h("tbody", {}, found.rows.map((row, i) => errorRow(row, i === first))),
    ),
  );
}

function rowName(row) {
  const place = row.block === null ? "" : `block ${row.block + 1} `;
  return row.parameter ? h("code", {}, `∂ ${row.name.replace("transformer.", "")}`) : h("span", {}, place, math(row.name));
}

/** Errors from rounding (1e-16) to 1 on a logarithmic scale. */
function errorRow(row, isFirst) {
  const size = row.error === null ? 1 : Math.min(Math.max((Math.log10(Math.max(row.error, 1e-17)) + 17) / 17, 0), 1);
  return h(
    "tr",
    { class: `${row.wrong ? "wrong" : "right"} ${isFirst ? "first" : ""}`, data: { gradient: row.parameter ? row.name : `${row.block === null ? "" : row.block + "."}${row.name}`, error: String(row.error) } },
    h("th", { scope: "row" }, rowName(row)),
    h("td", { class: "shares" }, h("span", { class: "length", "aria-hidden": "true" }, h("i", { style: { width: `${100 * size}%` } }))),
    h("td", { class: "num" }, row.problem || tiny2(row.error)),
    h("td", {}, row.wrong ? "✗" : "✓"),
  );
}

const tiny2 = (x) => (x >= 0.01 ? x.toPrecision(2) : tiny(x));

function diagnosisOf(said) {
  const nearest = said.found && said.candidates.find((one) => one.residual > 0 && !said.findings.some((finding) => one.names.includes(finding.name)));
  return h(
    "section",
    { class: "diagnosis", data: { found: String(said.found) } },
    h("h4", {}, "How the diagnosis finds it"),
    h("p", {}, `A function with this mistake is given to the checker, which knows only its signature, ${said.signature}. On ${said.cases} cases it compares every gradient with the exact one: `, said.wrong.length ? h("b", {}, `${said.wrong.join(", ")} wrong`) : h("b", {}, "none is wrong on plain cases"), ". Then it runs the known mistakes of that layer on the same data, and looks for the one that gives the same wrong numbers to rounding."),
    said.findings.length > 0 &&
      h(
        "ul",
        { class: "findings" },
        said.findings.map((finding) => h("li", { data: { finding: finding.name } }, h("b", {}, `✓ ${finding.name}`), finding.value && ` (${finding.value})`, h("span", { class: "aside" }, ` explains ${finding.gradients.join(", ")}`))),
      ),
    nearest && h("p", { class: "aside" }, `Any other known mistake of this layer misses these numbers by ${tiny2(nearest.residual)} or more.`),
    h("details", {}, h("summary", {}, "The report of onfoot check"), h("pre", { tabindex: "0" }, said.report)),
  );
}
