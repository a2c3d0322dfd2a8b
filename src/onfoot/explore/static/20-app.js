// The page: what is selected, which view is open, and the form that runs another text.

const state = {
  doc: null,
  view: "map",
  step: "embedding",
  cell: null, // { r, c } of the selected cell
  head: 0,
  steps: new Map(),
  owner: new Map(), // array -> the step that shows it
  openBlocks: new Set(),
  openHeads: new Set(),
  proofs: {},
  autograds: {},
  proving: {},
};

const numbersOf = (id) => JSON.parse(document.getElementById(id).textContent);
const store = document.getElementById("data") ? new EmbeddedStore(numbersOf("data")) : new ServedStore(numbersOf("opening"));
const VIEWS = { attention: drawAttention, training: drawTraining, step: drawOneStep, mistakes: drawMistakes };

function adoptDocument(doc) {
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

/** Opens the block and the head that the selected step is in. */
function openRow() {
  const step = state.steps.get(state.step);
  if (step.block !== null) state.openBlocks.add(step.block);
  if (step.head !== null || step.id === `${step.block}.3`) state.openHeads.add(step.block);
  if (step.head !== null) state.head = step.head;
}

/** Keeps the selected row in view inside the map's own column. */
function scrollMap() {
  const map = state.mapElement;
  const row = document.getElementById(`row-${state.step}`);
  if (!map || !row || map.scrollHeight <= map.clientHeight) return;
  const box = map.getBoundingClientRect();
  const seen = Math.min(box.bottom, innerHeight) - box.top; // its lower end may be below the window's
  const top = row.getBoundingClientRect().top - box.top + map.scrollTop;
  if (top < map.scrollTop + 40) map.scrollTop = top - 60;
  else if (top + row.offsetHeight > map.scrollTop + seen - 20) map.scrollTop = top + row.offsetHeight - seen + 60;
}

/** Follows a number to the step it belongs to: its main figures, its parameters, or what it has inside. */
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

/** Notes what is shown in the address, once it has stayed for a moment: a held arrow key changes it many times. */
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

/** Follows an address that was typed, or a link into this page. */
function followHash(event) {
  if (!state.doc) return;
  clearTimeout(state.writing);
  const before = state.view;
  readHash(new URL(event.newURL).hash);
  if (!state.steps.has(state.step)) state.step = "embedding";
  if (state.view === "map" && before === "map") select(state.step);
  else setView(state.view);
}

function say(text) {
  const message = document.getElementById("message");
  message.textContent = text;
  message.hidden = !text;
}

/** The run in a line, and the text as tokens with the loss at each. */
function drawFacts() {
  const { doc } = state;
  const { model, tokens } = doc;
  const worst = Math.max(...tokens.map((token) => token.loss || 0));
  const chips = tokens.map((token, t) => {
    const next = token.target === null ? "no target" : `next is ${quoted(doc.vocabulary[token.target])}, given ${percent(token.probability)}: loss ${brief(token.loss)}`;
    const best = token.best.map((one) => `${quoted(doc.vocabulary[one.id])} ${percent(one.probability)}`).join(", ");
    return h(
      "button",
      { type: "button", class: "chip", title: `${t} ${quoted(token.text)}: ${next}. Its bets: ${best}`, "aria-label": `Token ${t}, ${token.text}: ${next}`, data: { token: t }, onclick: () => chooseToken(t) },
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
    h("div", { class: "chips", role: "group", "aria-label": "The tokens, with the loss at each" }, chips),
  );
}

/** Selects a token's row in the figures that are open. */
function chooseToken(t) {
  state.cell = { r: t, c: state.cell.c };
  if (state.view === "map" && state.linked) state.linked.choose(t, state.cell.c);
}

async function run(body) {
  const main = document.getElementById("main");
  main.setAttribute("aria-busy", "true");
  try {
    adoptDocument(await store.study(body));
  } catch (error) {
    say(error.message);
    main.setAttribute("aria-busy", "false");
    return;
  }
  say("");
  if (!state.cell) state.cell = await tellingCell(state.steps.get(state.step));
  drawFacts();
  await setView(state.view);
  if (state.doc.model.large) return;
  proveAll(state.doc.key);
}

/** The cell to begin with: where the error signal is largest. */
async function tellingCell(step) {
  const matrix = await store.matrix(step.backward || step.forward);
  const at = matrix.values.reduce((best, x, i) => (Math.abs(x) > Math.abs(matrix.values[best]) ? i : best), 0);
  return { r: Math.floor(at / matrix.cols), c: at % matrix.cols };
}

const TOGETHER = 8; // steps to a question: few questions, and none that keeps the server long

/** Proves the steps one after the other, while nobody waits: first all by differences, then all by autograd. */
async function proveAll(key) {
  await state.detailReady;
  for (const way of state.doc.model.autograd ? ["proof", "autograd"] : ["proof"]) {
    const ids = state.doc.steps.map((step) => step.id);
    for (let i = 0; i < ids.length; i += TOGETHER) {
      if (state.doc.key !== key) return;
      await prove(way, ids.slice(i, i + TOGETHER)).catch(() => undefined);
    }
  }
  document.body.dataset.proven = key;
}

function start() {
  refreshColours();
  readHash(location.hash);
  const form = document.getElementById("ask");
  const kind = document.getElementById("kind");
  const text = document.getElementById("text");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const most = state.doc ? state.doc.model.most_characters : Infinity;
    if (text.value.length > 2 * most) say(`${grouped(text.value.length)} characters, the page takes ${grouped(most)}: shorten the text`);
    else run({ [kind.value]: text.value }); // the server counts exactly, and says what else is wrong
  });
  if (!store.served) {
    for (const element of form.elements) element.disabled = true;
    text.title = "This page is a copy of one run; onfoot explore runs other texts.";
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
  first(kind, text);
}

/** The text that the page opens with. */
async function first(kind, text) {
  const { opening } = store;
  kind.value = opening.kind;
  text.value = opening.value;
  if (opening.ids_only) kind.disabled = true;
  await run({ [opening.kind]: opening.value });
}

const THEMES = { "": ["◐", "follow the system"], light: ["○", "light"], dark: ["●", "dark"] };

function setUpTheme() {
  const button = document.getElementById("theme");
  const order = Object.keys(THEMES);
  const apply = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    button.textContent = THEMES[theme][0];
    button.setAttribute("aria-label", `Colours: ${THEMES[theme][1]}`);
    button.title = button.getAttribute("aria-label");
    refreshColours();
    if (state.doc) setView(state.view);
  };
  button.addEventListener("click", () => apply(order[(order.indexOf(document.documentElement.dataset.theme || "") + 1) % order.length]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(document.documentElement.dataset.theme || ""));
}

start();
