// The page: its state, its views, and the form that runs another text.

const state = {
  doc: null,
  view: "map",
  step: "embedding",
  cell: null, // { r, c } of the selected cell
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
  if (!state.steps.has(state.step)) state.step = "embedding";
  if (state.head >= doc.model.heads) state.head = 0;
  const few = doc.model.blocks <= 3;
  for (let b = 0; b < doc.model.blocks; b++) if (few) state.openBlocks.add(b);
}

const stepOf = (id) => state.owner.get(id);

/** Selects a step of the map and shows it. */
function select(id, { focus = false } = {}) {
  if (!state.steps.has(id)) return;
  state.step = id;
  openRow();
  showRows();
  const old = document.querySelector(".detail");
  if (old) old.replaceWith(drawDetail());
  if (focus) focusRow();
  scrollMap();
  writeHash();
}

/** Opens the block and the head of the selected step. */
function openRow() {
  const step = state.steps.get(state.step);
  if (step.block !== null) state.openBlocks.add(step.block);
  if (step.head !== null || step.id === `${step.block}.3`) state.openHeads.add(step.block);
  if (step.head !== null) state.head = step.head;
}

/** Scrolls the map until the selected row is visible. */
function scrollMap() {
  const map = state.mapElement;
  const row = document.getElementById(`row-${state.step}`);
  if (!map || !row || map.scrollHeight <= map.clientHeight) return;
  const box = map.getBoundingClientRect();
  const seen = Math.min(box.bottom, innerHeight) - box.top; // it may extend below the window
  const top = row.getBoundingClientRect().top - box.top + map.scrollTop;
  if (top < map.scrollTop + 40) map.scrollTop = top - 60;
  else if (top + row.offsetHeight > map.scrollTop + seen - 20) map.scrollTop = top + row.offsetHeight - seen + 60;
}

/** Goes to the cell of an array: in the main figures of its step, its parameters or its intermediate values. */
async function goTo(stepId, id, r, c) {
  const step = state.steps.get(stepId);
  const isMain = step.forward === id || step.backward === id;
  if (isMain) state.cell = { r, c };
  if (state.view !== "map") {
    state.step = stepId;
    await setView("map");
  } else select(stepId);
  if (isMain) {
    document.getElementById("step-name").focus();
    return;
  }
  await state.detailReady;
  if (step.inside.includes(id)) await openInside();
  const figure = [...document.querySelectorAll(".detail .figure")].find((element) => element.dataset.tensor === id);
  if (!figure) return;
  await figure.ready;
  figure.dispatchEvent(new CustomEvent("choose", { detail: { r, c } }));
  figure.scrollIntoView({ block: "center" });
  figure.querySelector("[role=grid]").focus({ preventScroll: true });
}

async function setView(view) {
  state.view = view;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.dataset.view === view;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
  }
  const main = document.getElementById("main");
  main.setAttribute("aria-labelledby", `tab-${view}`);
  tooltip.hide();
  writeHash();
  if (view === "map") {
    main.className = "with-map";
    openRow();
    main.replaceChildren(drawMap(), h("article", { class: "detail" }));
    main.querySelector(".detail").replaceWith(drawDetail());
    showRows();
    scrollMap();
  } else {
    main.className = "";
    state.mapElement = null;
    main.setAttribute("aria-busy", "true");
    let drawn;
    try {
      drawn = await VIEWS[view]();
    } catch (error) {
      drawn = h("p", { class: "message" }, error.message);
    }
    if (state.view !== view) return;
    main.replaceChildren(drawn);
  }
  main.setAttribute("aria-busy", "false");
}

/** Writes the state to the URL hash, after a delay: a held arrow key changes it many times. */
function writeHash() {
  clearTimeout(state.writing);
  state.writing = setTimeout(() => {
    const query = new URLSearchParams({ view: state.view, step: state.step, cell: `${state.cell.r},${state.cell.c}` });
    history.replaceState(null, "", `#${query}`);
  }, 200);
}

function readHash(hash) {
  const query = new URLSearchParams(hash.slice(1));
  const cell = /^(\d+),(\d+)$/.exec(query.get("cell") || "");
  if (cell) state.cell = { r: Number(cell[1]), c: Number(cell[2]) };
  if (query.get("step")) state.step = query.get("step");
  const head = /^\d+\.(\d+)\./.exec(state.step);
  if (head) state.head = Number(head[1]);
  if (query.get("view") === "map" || query.get("view") in VIEWS) state.view = query.get("view");
}

/** Applies a URL hash that was typed or linked. */
function followHash(event) {
  if (!state.doc) return;
  clearTimeout(state.writing);
  const before = state.view;
  readHash(new URL(event.newURL).hash);
  if (!state.steps.has(state.step)) state.step = "embedding";
  if (state.view === "map" && before === "map") select(state.step);
  else setView(state.view);
}

function showMessage(text) {
  const message = document.getElementById("message");
  message.textContent = text;
  message.hidden = !text;
}

/** The summary of the run, and the tokens with the loss at each. */
function drawFacts() {
  const { doc } = state;
  const { model, tokens } = doc;
  const worst = Math.max(...tokens.map((token) => token.loss || 0));
  const chips = tokens.map((token, t) => {
    const next = token.target === null ? "no target" : `target ${quoted(doc.vocabulary[token.target])}, probability ${percent(token.probability)}, loss ${brief(token.loss)}`;
    const best = token.best.map((one) => `${quoted(doc.vocabulary[one.id])} ${percent(one.probability)}`).join(", ");
    return h(
      "button",
      { type: "button", class: "chip", title: `${t} ${quoted(token.text)}: ${next}. Top predictions: ${best}`, "aria-label": `Token ${t}, ${token.text}: ${next}`, data: { token: t }, onclick: () => chooseToken(t) },
      h("span", { class: "chip-text" }, token.text),
      h("i", { class: "chip-loss", style: { height: `${token.loss === null ? 0 : Math.max(1, (18 * token.loss) / worst)}px` } }),
    );
  });
  document.getElementById("facts").replaceChildren(
    h(
      "p",
      { class: "run" },
      h("b", { id: "loss", data: { value: String(doc.loss) } }, `loss ${doc.loss.toFixed(6)}`),
      h("span", {}, `mean over ${plural(doc.targets, "target")}`),
      h("span", {}, `${plural(model.blocks, "block")} · ${plural(model.heads, "head")} · width ${model.width} · ${plural(model.parameters, "parameter")} · float64`),
    ),
    h("div", { class: "chips", role: "group", "aria-label": "Tokens and the loss at each" }, chips),
  );
}

/** Selects a token's row in the open figures. */
function chooseToken(t) {
  state.cell = { r: t, c: state.cell.c };
  if (state.view === "map" && state.linked) state.linked.choose(t, state.cell.c);
}

async function run(body) {
  const main = document.getElementById("main");
  main.setAttribute("aria-busy", "true");
  try {
    setDocument(await store.study(body));
  } catch (error) {
    showMessage(error.message);
    main.setAttribute("aria-busy", "false");
    return;
  }
  showMessage("");
  if (!state.cell) state.cell = await largestCell(state.steps.get(state.step));
  drawFacts();
  await setView(state.view);
  if (state.doc.model.large) return;
  proveAll(state.doc.key);
}

/** The cell selected at first: where the error signal is largest. */
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
  if (store.opening.own) state.view = "own";
  else {
    document.getElementById("tab-own").remove();
    delete VIEWS.own;
  }
  readHash(location.hash);
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
      setView(next.dataset.view);
    });
  }
  addEventListener("hashchange", followHash);
  setUpTheme();
  runOpening(kind, text);
}

/** Runs the text that the page opens with. */
async function runOpening(kind, text) {
  const { opening } = store;
  kind.value = opening.kind;
  text.value = opening.value;
  if (opening.ids_only) kind.disabled = true;
  await run({ [opening.kind]: opening.value });
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
    if (state.doc) setView(state.view);
  };
  button.addEventListener("click", () => apply(order[(order.indexOf(document.documentElement.dataset.theme || "") + 1) % order.length]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(document.documentElement.dataset.theme || ""));
}

start();
