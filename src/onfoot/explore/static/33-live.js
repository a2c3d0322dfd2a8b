// Training live: AdamW on this text, or the checkpoints of a run: played, paused and scrubbed.

const live = {
  key: "", // of the study that the training started from
  rates: [], // [first step, learning rate from it on]
  overRun: false, // the checkpoints of the run instead of AdamW on this text
  losses: [],
  before: null, // the losses with the earlier learning rate, for comparison
  at: 0,
  part: null, // the last answer of the server
  playing: false,
  pace: 2,
  logarithmic: false, // the scale of the losses
  turn: 0, // of the requests: only the last is shown
  loop: 0, // of playing: only the last goes on
  problem: "",
};
const LIVE_PACES = [1, 2, 5, 20]; // steps per picture
const LIVE_PAUSE = 40; // ms between two pictures
const LIVE_RATES = /^(\d{1,6})@(run|[0-9:.,e+-]{3,2000})$/;

const liveRates = () => (live.overRun ? "run" : live.rates.map(([step, rate]) => `${step}:${rate}`).join(","));
const liveRate = (t) => live.rates.findLast(([step]) => step <= t)[1];
const liveMost = () => (store.served ? live.part.most_steps : live.losses.length - 1);
const liveLabel = (t) => (live.part && live.part.checkpoints ? live.part.checkpoints[t] : t);

/** Starts over if another text is shown. */
function openLive() {
  const { trained, key } = state.doc;
  const base = trained ? trained.base : key;
  if (live.key === base) return;
  const rate = state.optimizer && !state.doc.model.frozen ? state.optimizer.lr : FIRST_LR;
  Object.assign(live, { key: base, rates: [[0, rate]], overRun: false, losses: [], before: null, at: 0, part: null, problem: "" });
  if (trained) readLive(`${trained.step}@${trained.rates}`);
}

/** Sets the step and the learning rates from a string such as 80@0:0.001,50:0.01. */
function readLive(text) {
  const found = LIVE_RATES.exec(text);
  if (!found) return false;
  const overRun = found[2] === "run";
  if (found[2] !== liveRates()) Object.assign(live, { losses: [], before: null, part: null });
  if (!overRun) live.rates = found[2].split(",").map((pair) => pair.split(":").map(Number));
  Object.assign(live, { overRun, at: Number(found[1]) });
  return true;
}

/** Asks for a step, in as many requests as the server needs; an exported page has all its steps at once. */
async function reachLive(t) {
  const turn = ++live.turn;
  for (;;) {
    const query = { rates: liveRates(), step: t, known: live.losses.length };
    let part;
    try {
      part = store.served ? await working("live", (job, signal) => store.ask(store.path("live", { ...query, job }).replace(`/${store.key}/`, `/${live.key}/`), { signal })) : await store.part("live");
    } catch (error) {
      if (turn !== live.turn) return false; // newer work stopped it
      throw error;
    }
    if (turn !== live.turn) return false;
    live.losses.length = part.known;
    live.losses.push(...part.losses);
    live.part = part;
    if (!store.served) return true;
    live.at = part.step;
    if (part.ended !== null && t > part.ended) live.problem = `The loss is not finite after step ${part.ended + 1}: the learning rate is too large. Choose a smaller one at an earlier step.`;
    if (part.step >= t || part.ended !== null) return true;
    liveProgress(t);
  }
}

function liveProgress(t) {
  const place = document.getElementById("live-status");
  if (place) place.textContent = `step ${live.losses.length - 1} of ${t} …`;
}

async function drawLive() {
  openLive();
  live.playing = false;
  await reachLive(live.at);
  const view = h(
    "article",
    { class: "view live" },
    h("h2", {}, "Training live"),
    h(
      "p",
      { class: "lead" },
      live.overRun
        ? "The loss of this text at every checkpoint of the run."
        : live.part.lora
        ? `AdamW trains LoRA layers of rank ${live.part.lora.rank} on this text alone: ${grouped(live.part.lora.trainable)} parameters. The ${grouped(state.doc.model.parameters)} weights of the model stay as they are. Pause at any step, go back, or change the learning rate while it runs.`
        : "AdamW trains a copy of the model on this text alone, so the loss falls quickly: the model learns it by heart. Pause at any step, go back, or change the learning rate while it runs.",
    ),
    live.part.run && live.part.run.length > 1 && liveSource(),
    live.part.checkpoints && liveSource(),
    liveControls(),
    h("p", { id: "live-problem", class: "message", role: "alert", hidden: true }),
    h("div", { id: "live-chart" }),
    h("div", { id: "live-facts" }),
    h("div", { id: "live-difference" }),
  );
  requestAnimationFrame(() => showLive());
  return view;
}

/** The choice between AdamW on this text and the checkpoints of the run. */
function liveSource() {
  const choice = h(
    "select",
    {
      id: "live-source",
      onchange: () => {
        Object.assign(live, { overRun: choice.value === "run", losses: [], before: null, at: 0, part: null });
        setView("live");
      },
    },
    h("option", { value: "text" }, "AdamW on this text"),
    h("option", { value: "run" }, "checkpoints of the run"),
  );
  choice.value = live.overRun ? "run" : "text";
  return h("p", { class: "controls" }, h("label", { for: "live-source" }, "play"), choice);
}

function liveControls() {
  const play = h("button", { id: "live-play", type: "button", class: "primary", onclick: () => (live.playing ? pauseLive() : playLive()) }, "Play");
  const scrub = h("input", { id: "live-scrub", type: "range", min: "0", step: "1", "aria-label": "Training step", oninput: () => scrubLive(Number(scrub.value)) });
  const rate = h("input", { id: "live-rate", type: "number", min: "0.000001", max: "1", step: "any", disabled: !store.served || live.overRun, onchange: () => changeRate(Number(rate.value)) });
  const pace = h("select", { id: "live-pace", onchange: () => (live.pace = Number(pace.value)) }, LIVE_PACES.map((n) => h("option", { value: String(n) }, plural(n, "step"))));
  pace.value = String(live.pace);
  const scale = h("input", { id: "live-scale", type: "checkbox", onchange: () => ((live.logarithmic = scale.checked), showLive()) });
  scale.checked = live.logarithmic;
  return h(
    "div",
    { class: "live-controls" },
    h(
      "div",
      { class: "controls" },
      play,
      h("button", { id: "live-start", type: "button", onclick: startLiveOver }, "Start over"),
      !live.overRun && h("span", { class: "what-pair" }, h("label", { for: "live-pace" }, "per picture"), pace),
      !live.overRun && h("span", { class: "what-pair" }, h("label", { for: "live-rate" }, "learning rate"), rate),
      h("span", { class: "what-pair" }, scale, h("label", { for: "live-scale" }, "logarithmic")),
    ),
    h("div", { class: "live-scrub" }, scrub, h("output", { id: "live-step", for: "live-scrub" })),
    h("p", { id: "live-status", class: "aside", role: "status" }),
    h(
      "p",
      { class: "aside" },
      !store.served && "This exported page has these steps only; run onfoot explore to play on.",
      store.served && !live.overRun && `Up to ${grouped(live.part.most_steps)} steps. ${live.part.lora ? "LoRA layers" : "Weights"} and moments are kept every ${live.part.every} steps, at most ${brief(live.part.most_bytes / 1e6, 3)} MB; the steps between are computed again. Another learning rate at an earlier step drops the steps after it.`,
    ),
  );
}

/** Plays until it is paused, another view is opened, or the last step is reached. */
async function playLive() {
  if (!live.part) return; // the first answer is still on its way
  live.playing = true;
  live.problem = "";
  const loop = ++live.loop;
  showLive();
  while (live.playing && loop === live.loop && state.view === "live") {
    if (live.at >= liveMost()) break;
    const to = Math.min(live.at + (live.overRun ? 1 : live.pace), liveMost());
    if (!(await goLive(to)) || live.problem) break;
    await new Promise((resolve) => setTimeout(resolve, LIVE_PAUSE));
  }
  if (loop === live.loop) pauseLive();
}

function pauseLive() {
  live.playing = false;
  live.turn++; // an answer that is still on its way is not shown
  stopWork("live");
  if (state.view !== "live" || !document.getElementById("live-play")) return;
  showLive();
  document.getElementById("live-status").textContent = `Paused at step ${liveLabel(live.at)}, loss ${brief(live.losses[live.at])}.`;
  writeHash();
}

/** Goes to a step and shows it; false if something newer was asked for, or it failed. */
async function goLive(t) {
  live.problem = "";
  if (!store.served) live.at = t;
  try {
    if (store.served && !(await reachLive(t))) return false;
  } catch (error) {
    live.problem = error.message;
  }
  showLive();
  return !live.problem;
}

/** Shows the loss at once, and the rest when it is computed. */
async function scrubLive(t) {
  live.playing = false;
  live.at = t;
  showLive();
  await goLive(t);
  writeHash();
}

function startLiveOver() {
  Object.assign(live, { playing: false, before: null, at: 0, problem: "" });
  if (store.served && !live.overRun) Object.assign(live, { rates: [[0, liveRate(0)]], losses: [] });
  goLive(0).then(writeHash);
}

/** Takes another learning rate from this step on. The steps after it are dropped. */
function changeRate(rate) {
  if (!(rate > 0 && rate <= 1)) {
    live.problem = "The learning rate must be > 0 and <= 1.";
    return showLive();
  }
  live.problem = "";
  if (rate !== liveRate(live.at)) {
    live.turn++; // an answer with the old rate is not wanted any more
    if (live.losses.length > live.at + 1) live.before = [...live.losses];
    live.rates = [...live.rates.filter(([step]) => step < live.at), [live.at, rate]];
    live.losses.length = Math.min(live.losses.length, live.at + 1);
    if (live.playing) playLive();
  }
  writeHash();
  return showLive();
}

/** Draws everything that changes from step to step. */
function showLive() {
  const chart = document.getElementById("live-chart");
  if (!chart || !live.part) return;
  const last = Math.max(live.losses.length - 1, 0);
  const at = Math.min(live.at, last);
  const play = document.getElementById("live-play");
  play.textContent = live.playing ? "Pause" : "Play";
  play.disabled = !live.playing && at >= liveMost();
  const scrub = document.getElementById("live-scrub");
  scrub.max = String(last);
  scrub.value = String(at);
  scrub.setAttribute("aria-valuetext", `step ${liveLabel(at)}, loss ${brief(live.losses[at])}`);
  document.getElementById("live-step").replaceChildren(`step ${liveLabel(at)} of ${liveLabel(last)}`);
  const rate = document.getElementById("live-rate");
  if (rate && document.activeElement !== rate) rate.value = String(liveRate(at));
  const problem = document.getElementById("live-problem");
  problem.textContent = live.problem;
  problem.hidden = !live.problem;
  chart.replaceChildren(liveChart(at));
  document.getElementById("live-facts").replaceChildren(liveFacts(at));
  document.getElementById("live-difference").replaceChildren(liveDifference());
}

function liveFacts(at) {
  const rows = [
    ["first", live.losses[0], live.overRun ? "loss at the first checkpoint" : "loss at step 0"],
    ["loss", live.losses[at], `loss at step ${liveLabel(at)}`],
    ["change", live.losses[at] - live.losses[0], "change"],
  ].slice(at === 0 ? 1 : 0, at === 0 ? 2 : 3); // at the first step there is nothing to compare
  const here = state.doc.trained && state.doc.trained.step === at && state.doc.trained.rates === liveRates();
  return h(
    "div",
    { class: "live-facts" },
    h("dl", { class: "pairs" }, rows.map(([key, value, text]) => [h("dt", {}, text), h("dd", { data: { live: key, value: String(value) } }, exact(value))])),
    store.served &&
      (at > 0 || live.overRun || state.doc.trained) &&
      h("button", { id: "live-show", type: "button", disabled: live.playing || here, onclick: () => showTrained(live.at, "map") }, at > 0 || live.overRun ? `Show the map, and every view, at step ${liveLabel(at)}` : "Show every view at step 0"),
  );
}
