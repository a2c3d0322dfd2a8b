// The selected step: activation and error signal side by side, parameters, intermediate values and source lines.

function drawDetail() {
  const step = state.steps.get(state.step);
  const linked = new Linked(state.cell);
  linked.onchange = (r, c) => {
    state.cell = { r, c };
    writeHash();
  };
  state.linked = linked;
  const shown = [step.forward, step.backward].filter(Boolean);
  const wide = shown.some((id) => (store.meta(id).shape[1] || 0) > 64);
  const figures = shown.map((id) => new Figure({ id, linked }));
  const detail = h(
    "article",
    { class: "detail", "aria-labelledby": "step-name" },
    detailHead(step),
    h("div", { class: `pair ${wide || shown.length < 2 ? "stacked" : ""}` }, figures.map((figure) => figure.element)),
    (step.id === "tok" && store.has("a_pos")) || step.id === "pos" ? h("p", { class: "aside" }, "A sum passes its error signal unchanged to both terms: ", math("a_tok"), " and ", math("a_pos"), " receive that of ", math("a_1"), ".") : null,
    parametersOf(step),
    insideOf(step),
    sourceOf(shown.concat(step.parameters.map(([, gradient]) => gradient))),
  );
  state.detailReady = Promise.all(figures.map((figure) => figure.ready));
  proveSelected(step);
  return detail;
}

/** The block and head of a step. */
const blockAndHead = (step) => (step.block === null ? "" : `block ${step.block + 1}${step.head === null ? "" : `, head ${step.head + 1}`}`);

/** A step by its name and place: Causal mask, block 2, head 1. */
const stepPlace = (step) => [step.name, blockAndHead(step)].filter(Boolean).join(", ");

function detailHead(step) {
  const where = blockAndHead(step);
  const go = (by, text, label) =>
    h("button", { type: "button", class: "quiet", "aria-label": label, onclick: () => moveBy(by) }, text);
  return h(
    "header",
    { class: "detail-head" },
    h("h2", { id: "step-name", tabindex: "-1" }, step.name, where && h("span", { class: "where-in" }, ` ${where}`)),
    h("div", { class: "moves" }, h("button", { type: "button", class: "quiet to-map", onclick: backToMap }, "Map"), go(-1, "↑", "Previous step"), go(1, "↓", "Next step")),
  );
}

function moveBy(by) {
  const shown = shownSteps();
  const to = shown[shown.indexOf(state.step) + by];
  if (to) select(to, { push: true });
}

function backToMap() {
  state.mapElement.scrollIntoView({ block: "start" });
  focusRow();
}

/** Checks the gradients of the selected step before all others. For a large model, only on request. */
async function proveSelected(step) {
  await state.detailReady;
  if (state.step !== step.id) return;
  const waiting = [...document.querySelectorAll(".badge.waiting")];
  if (state.doc.model.frozen && !store.served) {
    for (const element of waiting) element.replaceChildren("not checked in this file");
    return;
  }
  if (!state.doc.model.large || !store.served) {
    await prove("proof", [step.id]);
    return;
  }
  for (const element of waiting) {
    const button = h("button", { type: "button", class: "quiet small", onclick: () => proveNow(step.id, waiting) }, "check");
    element.replaceChildren(button);
  }
}

async function proveNow(stepId, waiting) {
  const begun = Date.now();
  const say = () => {
    const seconds = Math.round((Date.now() - begun) / 1000);
    for (const element of waiting) if (element.classList.contains("waiting")) element.replaceChildren(seconds ? `checking … ${seconds} s` : "checking …");
  };
  say();
  const ticking = setInterval(say, 1000);
  try {
    await prove("proof", [stepId]);
  } finally {
    clearInterval(ticking);
  }
  if (state.doc.model.autograd) await prove("autograd", [stepId]);
}

function parametersOf(step) {
  if (!step.parameters.length) return null;
  const parts = step.parameters.map(([weight, gradient]) => {
    const linked = new Linked({ r: 0, c: 0 });
    const wide = (store.meta(gradient).shape[1] || 0) > 64 || store.meta(gradient).shape.length === 1;
    const figures = [new Figure({ id: weight, linked, terms: false }), new Figure({ id: gradient, linked })];
    return h(
      "section",
      { class: "parameter" },
      h("h4", {}, h("code", {}, parameterName(gradient))),
      h("div", { class: `pair ${wide ? "stacked" : ""}` }, figures.map((figure) => figure.element)),
    );
  });
  return h("section", { class: "block" }, h("h3", {}, "Parameters and their gradients"), parts);
}

function parameterName(gradient) {
  const meta = store.meta(gradient);
  return `${meta.parameter}${meta.part ? `, ${meta.part}` : ""}`;
}

/** The intermediate values in the formulas; drawn when opened. */
function insideOf(step) {
  if (!step.inside.length) return null;
  const box = h("div", { class: "small-figures" });
  const details = h("details", { class: "block inside" }, h("summary", {}, h("h3", {}, "Intermediate values")), box);
  details.addEventListener("toggle", () => details.open && fillInside(step, box));
  return details;
}

function fillInside(step, box) {
  if (box.childElementCount) return state.insideReady;
  const { linked } = state;
  const flat = new Linked({ r: 0, c: linked.cell.r });
  const figures = step.inside.map((id) => {
    const meta = store.meta(id);
    return new Figure({ id, linked: meta.shape.length === 2 ? linked : flat, terms: Boolean(meta.terms), compact: true, maxHeight: 300 });
  });
  box.append(...figures.map((figure) => figure.element));
  state.insideReady = Promise.all(figures.map((figure) => figure.ready));
  return state.insideReady;
}

function openInside() {
  const details = document.querySelector(".inside");
  const ready = fillInside(state.steps.get(state.step), details.querySelector(".small-figures"));
  details.open = true;
  return ready;
}

function sourceOf(ids) {
  const seen = new Map();
  for (const id of ids) {
    for (const line of store.meta(id).source || []) {
      const key = `${line.file}:${line.line}`;
      if (!seen.has(key)) seen.set(key, { ...line, of: [] });
      seen.get(key).of.push(store.meta(id).symbol);
    }
  }
  if (!seen.size) return null;
  const lines = [...seen].map(([location, line]) =>
    h("li", {}, h("span", { class: "place" }, line.of.map((symbol) => [math(symbol), " "]), h("span", { class: "file" }, location)), h("code", {}, line.code)),
  );
  return h("section", { class: "block source" }, h("h3", {}, "Source lines"), h("ul", {}, lines));
}
