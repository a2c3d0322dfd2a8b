// Every view at a training step: the badge that says so, and what the address says about it.

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
    h("button", { id: "trained-live", type: "button", class: "small", onclick: () => setView("live") }, "Go on training"),
    h("button", { id: "trained-back", type: "button", class: "small", onclick: leaveTrained }, rates === "run" ? "Back to the opened model" : "Back to step 0"),
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
