// The page: its state, its views, and the form that runs another text.

const FIRST_STEP = "loss"; // where the error is, and the backward pass begins
const RUNNING = "Running the text …";

const state = {
  doc: null,
  view: "map",
  step: FIRST_STEP,
  cell: null, // { r, c } of the selected cell; r is its token, also where the tokens are columns
  token: null, // whose prediction is shown
  at: null, // { id, r, c } of the selected cell of a parameter or intermediate value
  asked: null, // { kind, value } of the text that is shown
  head: 0,
  steps: new Map(),
  owner: new Map(), // array id -> the step that shows it
  openBlocks: new Set(),
  openHeads: new Set(),
  proofs: {},
  autograds: {},
  proving: {},
};

const numbersOf = (id) => JSON.parse(document.getElementById(id).textContent);
const store = document.getElementById("data") ? new EmbeddedStore(numbersOf("data")) : new ServedStore(numbersOf("opening"));
const VIEWS = { attention: drawAttention, training: drawTraining, step: drawOneStep, live: drawLive, whatif: drawWhatIf, mistakes: drawMistakes, own: drawOwn };

function setDocument(doc) {
  drawTrained(doc);
  Object.assign(state, { doc, steps: new Map(), owner: new Map(), proofs: {}, autograds: {}, proving: {}, openBlocks: new Set(), openHeads: new Set(), optimizer: null });
  for (const step of doc.steps) {
    state.steps.set(step.id, step);
    for (const id of [step.forward, step.backward]) if (id && !state.owner.has(id)) state.owner.set(id, step.id);
  }
  for (const step of doc.steps) {
    for (const id of [...step.parameters.flat(), ...step.inside]) if (!state.owner.has(id)) state.owner.set(id, step.id);
  }
  state.owner.set("Δ_1", "embedding");
  const few = doc.model.blocks <= 3;
  for (let b = 0; b < doc.model.blocks; b++) if (few) state.openBlocks.add(b);
}

const stepOf = (id) => state.owner.get(id);

/** Selects a step of the map and shows it; `push` makes it an entry of the history, `open` opens its block and head and scrolls to it. */
function select(id, { focus = false, push = false, at = null, open = true } = {}) {
  if (!state.steps.has(id)) return;
  Object.assign(state, { step: id, at });
  if (open) openRow();
  if (push) pushHash();
  showRows();
  const old = document.querySelector(".detail");
  if (old) old.replaceWith(drawDetail());
  if (focus) focusRow();
  if (open) scrollMap();
  writeHash();
}

/** Opens the block and the head of the selected step. */
function openRow() {
  const step = state.steps.get(state.step);
  if (step.block !== null) state.openBlocks.add(step.block);
  if (step.head !== null || step.id === `${step.block}.3`) state.openHeads.add(step.block);
  if (step.head !== null) state.head = step.head;
}

/** Tells the style sheet where the map begins, so that it ends with the window and its last row can be seen. */
function fitMap() {
  if (!state.mapElement || !state.mapElement.isConnected) return;
  const top = Math.max(Math.round(state.mapElement.getBoundingClientRect().top), 0);
  document.documentElement.style.setProperty("--map-top", `${top}px`);
}

/** Scrolls the map until the selected row is visible. */
function scrollMap() {
  const map = state.mapElement;
  fitMap();
  const row = document.getElementById(`row-${state.step}`);
  if (!map || !row || map.scrollHeight <= map.clientHeight) return;
  const box = map.getBoundingClientRect();
  const seen = Math.min(box.bottom, lowestSeen()) - box.top;
  const top = row.getBoundingClientRect().top - box.top + map.scrollTop;
  if (top < map.scrollTop + 40) map.scrollTop = top - 60;
  else if (top + row.offsetHeight > map.scrollTop + seen - 20) map.scrollTop = top + row.offsetHeight - seen + 60;
}

/** Goes to the cell of an array: in the main figures of its step, its parameters or its intermediate values. */
async function goTo(stepId, id, r, c) {
  const step = state.steps.get(stepId);
  const isMain = step.forward === id || step.backward === id;
  const at = isMain ? null : { id, r, c };
  if (isMain) {
    state.cell = linkedCell(id, r, c);
    const t = tokenOf(store.meta(id), r, c);
    if (t !== null) setToken(t);
  }
  if (state.view !== "map") {
    state.step = stepId;
    await setView("map", { at });
  } else select(stepId, { push: true, at });
  if (isMain) {
    document.getElementById("step-name").focus();
    return;
  }
  await state.detailReady;
  const figure = await showAt();
  if (!figure) return;
  figure.scrollIntoView({ block: "center" });
  figure.querySelector("[role=grid]").focus({ preventScroll: true });
}

async function setView(view, { push = true, at = null } = {}) {
  const turn = (state.turn = (state.turn || 0) + 1);
  for (const kind of [...works.keys()]) if (kind !== "tour") stopWork(kind); // of the view that is left
  Object.assign(state, { view, at });
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.dataset.view === view;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen) reveal(tab);
  }
  const panel = document.getElementById("panel");
  panel.setAttribute("aria-labelledby", `tab-${view}`);
  tooltip.hide();
  if (push) pushHash();
  writeHash();
  if (view === "map") {
    panel.className = "panel with-map";
    openRow();
    panel.replaceChildren(drawMap(), h("article", { class: "detail" }));
    panel.querySelector(".detail").replaceWith(drawDetail());
    showRows();
    scrollMap();
  } else {
    const tab = document.getElementById(`tab-${view}`);
    setBusy(`Computing ${tab ? quoted(tab.textContent) : "the view"} …`);
    let drawn;
    try {
      drawn = await VIEWS[view]();
    } catch (error) {
      drawn = failedNote(error, () => setView(view, { push: false }));
    }
    if (state.turn !== turn) return;
    panel.className = "panel"; // only now: what was shown meanwhile keeps its layout
    state.mapElement = null;
    panel.replaceChildren(drawn);
  }
  setBusy(state.request ? RUNNING : "");
}

function showMessage(text) {
  const message = document.getElementById("message");
  message.textContent = text;
  message.hidden = !text;
}

/** The summary of the run, and the tokens with the loss at each. */
function drawFacts() {
  const { doc } = state;
  const { model } = doc;
  document.getElementById("facts").replaceChildren(
    h(
      "p",
      { class: "run" },
      h("b", { id: "loss", data: { value: String(doc.loss) } }, `loss ${doc.loss.toFixed(6)}`),
      h("span", {}, `mean over ${plural(doc.targets, "target")}`),
      h("span", {}, `${plural(model.blocks, "block")} · ${plural(model.heads, "head")} · width ${model.width} · ${plural(model.parameters, "parameter")} · float64`),
    ),
    drawChips(),
    errorLine(),
  );
  setToken(state.token);
}

/** Runs a text, {"text": …} or {"ids": …}, and shows it. Only the text asked for last is shown. Returns whether it was. */
async function run(body, { push = true, query = null, quiet = false } = {}) {
  const request = cancelRun();
  stopWork();
  state.request = request;
  setBusy(RUNNING);
  let doc;
  try {
    doc = await store.study(body, request.signal);
  } catch (error) {
    if (state.request !== request) return false;
    if (!quiet) showMessage(error.message);
    setBusy("");
    return false;
  }
  if (state.request !== request) return false;
  state.request = null;
  const [[kind, value]] = Object.entries(body);
  if (store.served) showMessage("");
  const old = state.asked;
  state.asked = { kind, value };
  setDocument(doc);
  if (query) await recallEarly(query);
  else if (old && (state.step === FIRST_STEP || state.cell.r >= doc.tokens.length - 1)) Object.assign(state, { cell: null, token: null }); // the last token has no target: its error signal is 0
  await settle();
  if (state.doc !== doc) return false;
  document.getElementById("kind").value = kind;
  document.getElementById("text").value = value;
  drawFacts();
  await setView(state.view, { push, at: state.at });
  if (!doc.model.large) proveAll(doc.key);
  return true;
}

/** Drops the request for a text that is still under way; returns a new one. */
function cancelRun() {
  if (state.request) state.request.abort();
  state.request = null;
  setBusy("");
  return new AbortController();
}

/** The cell selected at first: of the token with the largest loss, the score of its target, else its largest error signal. */
async function firstCell(step) {
  const r = worstToken();
  const id = step.backward || step.forward;
  const { target } = state.doc.tokens[r];
  const { columns } = store.meta("a_12");
  const atTarget = target === null ? 0 : indexIn(columns, target, 0);
  if (TOKENS_ARE_COLUMNS.has(id) || store.meta(id).axes[1] === "vocabulary") return { r, c: atTarget };
  const line = await store.line(id, "row", r);
  return { r, c: line.reduce((best, x, i) => (Math.abs(x) > Math.abs(line[best]) ? i : best), 0) };
}

/** The cell of an array where its number is largest. */
async function largestCell(step) {
  const matrix = await store.matrix(step.backward || step.forward);
  const at = matrix.values.reduce((best, x, i) => (Math.abs(x) > Math.abs(matrix.values[best]) ? i : best), 0);
  return { r: Math.floor(at / matrix.cols), c: at % matrix.cols };
}

const STEPS_PER_REQUEST = 8; // few requests, none of which keeps the server busy for long

/** Checks all gradients in the background: first all steps by finite differences, then all by autograd. */
async function proveAll(key) {
  await state.detailReady;
  for (const method of state.doc.model.autograd ? ["proof", "autograd"] : ["proof"]) {
    const ids = state.doc.steps.map((step) => step.id);
    for (let i = 0; i < ids.length; i += STEPS_PER_REQUEST) {
      if (state.doc.key !== key) return;
      await prove(method, ids.slice(i, i + STEPS_PER_REQUEST)).catch(() => undefined);
    }
  }
  document.body.dataset.proven = key;
}

function start() {
  refreshColours();
  correctScripts();
  const bar = document.querySelector(".view-bar");
  new ResizeObserver(() => document.documentElement.style.setProperty("--bar", `${bar.offsetHeight}px`)).observe(bar);
  if (!store.opening.own) {
    document.getElementById("tab-own").remove();
    delete VIEWS.own;
  }
  state.view = firstView();
  const form = document.getElementById("ask");
  const kind = document.getElementById("kind");
  const text = document.getElementById("text");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const limit = state.doc ? state.doc.model.most_characters : Infinity;
    if (text.value.length > 2 * limit) showMessage(`the text has ${grouped(text.value.length)} characters, the limit is ${grouped(limit)}; shorten it`);
    else run({ [kind.value]: text.value }); // the server does the exact checks
  });
  if (!store.served) {
    for (const element of form.elements) element.disabled = true;
    text.title = "This exported page contains one run; use onfoot explore to run other texts.";
  }
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const [i, tab] of tabs.entries()) {
    tab.addEventListener("click", () => setView(tab.dataset.view));
    tab.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const next = tabs[(i + by + tabs.length) % tabs.length];
      next.focus();
      setView(next.dataset.view, { push: !event.repeat });
    });
  }
  history.scrollRestoration = "manual"; // a view is drawn before it can be scrolled
  addEventListener("popstate", followAddress);
  document.addEventListener("scroll", keepScroll, { capture: true, passive: true });
  addEventListener("scroll", fitMap, { passive: true });
  new ResizeObserver(fitMap).observe(document.getElementById("facts"));
  addEventListener("resize", fitMap);
  setUpTheme();
  document.getElementById("work-stop").addEventListener("click", () => stopWork());
  runOpening();
}

/** Runs the text that the address names, or else the one that the page opens with. */
async function runOpening() {
  const query = readAddress();
  const asked = askedBy(query);
  if (store.opening.ids_only) document.getElementById("kind").disabled = true;
  const first = { kind: store.opening.kind, value: store.opening.value };
  for (const { kind, value } of isOpening(asked) ? [first] : [asked, first]) {
    const quiet = !isOpening({ kind, value }); // a text that cannot be run any more
    if (await run({ [kind]: value }, { push: false, query, quiet })) break;
    if (state.doc) return; // another text was run meanwhile
  }
  address.read = query;
  await recallLate(query);
}

const THEMES = { "": ["◐", "system"], light: ["○", "light"], dark: ["●", "dark"] };

function setUpTheme() {
  const button = document.getElementById("theme");
  const order = Object.keys(THEMES);
  const apply = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    button.textContent = THEMES[theme][0];
    button.setAttribute("aria-label", `Colour theme: ${THEMES[theme][1]}`);
    button.title = button.getAttribute("aria-label");
    refreshColours();
    if (state.doc) setView(state.view, { push: false, at: state.at }).then(showAt);
  };
  button.addEventListener("click", () => apply(order[(order.indexOf(document.documentElement.dataset.theme || "") + 1) % order.length]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(document.documentElement.dataset.theme || ""));
}
