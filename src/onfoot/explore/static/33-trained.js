// Every view at a training step: the badge that says so, the difference from step 0, and what the address says about it.

/** The text that is shown, as a request. */
function textShown() {
  const { kind, value } = state.asked || { kind: document.getElementById("kind").value, value: document.getElementById("text").value };
  return { [kind]: value };
}

/** Shows the study of the model after t steps; t = 0 of AdamW is the model itself. */
async function showTrained(t, view = state.view) {
  const body = textShown();
  if (t > 0 || live.overRun) {
    try {
      if (!(await reachLive(t))) return;
    } catch (error) {
      showMessage(error.message);
      return;
    }
    body.trained = `${live.at}@${liveRates()}`;
  }
  state.view = view;
  await run(body);
}

/** The badge that says which training step is shown. */
function drawTrained(doc) {
  const place = document.getElementById("trained");
  place.hidden = !doc.trained;
  if (!doc.trained) return place.replaceChildren();
  const { label, rates } = doc.trained;
  const what = rates === "run" ? `the checkpoint of step ${label}` : `the model after ${plural(label, "training step")} on this text`;
  return place.replaceChildren(
    h("p", { data: { trained: String(label) } }, h("b", {}, `Step ${label}`), ` Every view shows ${what}: loss ${brief(doc.loss)}.`),
    h("span", { class: "what-pair" }, differenceChoice(), h("label", { for: "trained-difference" }, `difference from ${firstStep(doc)}`)),
    h("button", { id: "trained-live", type: "button", class: "small", onclick: () => setView("live") }, "Go on training"),
    h("button", { id: "trained-back", type: "button", class: "small", onclick: leaveTrained }, rates === "run" ? "Back to the opened model" : "Back to step 0"),
  );
}

/** What the difference is taken from. */
const firstStep = (doc) => (doc.trained.rates === "run" ? "the opened model" : "step 0");

/** Shows the numbers of this step, or how far they are from those at step 0. */
function differenceChoice() {
  const choice = h("input", {
    id: "trained-difference",
    type: "checkbox",
    title: "In the Map and in Attention",
    onchange: () => {
      state.difference = choice.checked;
      setView(state.view, { at: state.at });
    },
  });
  choice.checked = Boolean(state.difference);
  return choice;
}

const DIFFERENCE_VIEWS = ["map", "attention"];

/** Whether a figure shows the difference from step 0. Some columns of a large vocabulary are those of this step only. */
function isDifference(meta) {
  return Boolean(state.difference && state.doc.trained && DIFFERENCE_VIEWS.includes(state.view) && !meta.rows && !meta.columns);
}

/** An array at step 0, of which this study is a later step. */
async function matrixAtFirst(id) {
  const path = store.path("tensor", { id }).replace(`/${store.key}/`, `/${state.doc.trained.base}/`);
  return new Matrix(new Float64Array(await (await store.fetch(path)).arrayBuffer()), store.meta(id).shape);
}

/** An array minus that at step 0; equal infinities differ by 0. */
function differenceOf(now, first) {
  return new Matrix(now.values.map((x, i) => (x === first.values[i] ? 0 : x - first.values[i])), now.shape);
}

/** The selected cell of a difference: the number, and the two that it is the difference of. */
function explainDifference(figure, r, c) {
  const [value, now, first] = [figure.matrix, figure.now, figure.first].map((matrix) => matrix.at(r, c));
  const where = firstStep(state.doc);
  return h(
    "div",
    { class: "explanation difference", data: { r, c } },
    h("p", { class: "number" }, math(figure.meta.symbol), h("span", { class: "at" }, `[${cellLabel(figure.meta, r, c)}]`), ` − that at ${where} = `, h("output", { class: "value", data: { value: String(value), now: String(now), first: String(first) } }, exact(value))),
    h("p", { class: "aside" }, `${exact(now)} now, ${exact(first)} at ${where}`),
  );
}

async function leaveTrained() {
  await run(textShown());
  document.getElementById("main").focus();
}

const trainedNow = () => (state.doc && state.doc.trained ? `${state.doc.trained.step}@${state.doc.trained.rates}` : "");

/** Shows the step that a link names, or step 0 again. */
async function recallTrained(text) {
  if (!state.doc || !store.served || text === trainedNow()) return;
  openLive();
  if (!text) await leaveTrained();
  else if (readLive(text)) await showTrained(live.at);
}

remember("difference", () => (state.difference && trainedNow() ? "1" : ""), (text) => (state.difference = text === "1"), EARLY);
remember("trained", trainedNow, recallTrained);
remember(
  "live",
  () => (state.view === "live" && store.served && live.at > 0 ? `${live.at}@${liveRates()}` : ""),
  async (text) => {
    if (!state.doc || !store.served || state.view !== "live") return;
    openLive();
    if (text ? readLive(text) : ((live.at = 0), true)) await setView("live", { push: false });
  },
);
