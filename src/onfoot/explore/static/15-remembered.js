// What a link reopens: the text, the view, the step, the cell and the choices of each view.

const INTEGER = /^\d{1,6}$/;
const CELL = /^(\d{1,6}),(\d{1,6})$/;
const EARLY = { early: true };

const firstView = () => (VIEWS.own ? "own" : "map");
const isOpening = ({ kind, value }) => kind === store.opening.kind && value === store.opening.value;
const askedAs = (kind) => (state.asked && state.asked.kind === kind && !isOpening(state.asked) ? state.asked.value : "");

remember("view", () => state.view, (view) => (state.view = view === "map" || view in VIEWS ? view : firstView()), EARLY);
remember("step", () => state.step, (step) => (state.step = state.steps.has(step) ? step : FIRST_STEP), EARLY);
remember("cell", () => (state.cell ? cellText(ownCell(shownArray(), state.cell)) : ""), (text) => (state.cell = cellIn(shownArray(), text)), EARLY);
remember("head", () => (state.head ? String(state.head + 1) : ""), (head) => (state.head = INTEGER.test(head) ? Number(head) - 1 : 0), EARLY);
remember("token", () => (state.cell && state.token !== state.cell.r ? String(state.token) : ""), (t) => (state.token = INTEGER.test(t) ? Number(t) : null), EARLY);
remember("at", () => (state.at ? `${state.at.id}:${state.at.r},${state.at.c}` : ""), (text) => (state.at = atOf(text)), EARLY);
remember("text", () => askedAs("text"), () => undefined);
remember("ids", () => askedAs("ids"), () => undefined);
remember("parameter", () => state.updateOf || "", (name) => (state.updateOf = name), EARLY);
remember("lr", () => (state.optimizer && state.optimizer.lr !== firstRate() ? String(state.optimizer.lr) : ""), (lr) => setOptimizer({ lr: Number(lr) || firstRate() }), EARLY);
remember("steps", () => (state.optimizer && state.optimizer.steps > 1 ? String(state.optimizer.steps) : ""), (n) => setOptimizer({ steps: INTEGER.test(n) ? Number(n) : 1 }), EARLY);
remember("mistake", () => (state.mistake && state.mistake !== state.firstMistake ? state.mistake : ""), (key) => (state.mistake = key || state.firstMistake), EARLY);
remember("own", () => state.ownRow || "", (row) => (state.ownRow = row), EARLY);

/** The array of the selected step whose cells an address names. */
function shownArray() {
  const step = state.steps.get(state.step);
  return step ? step.backward || step.forward : "";
}

const cellText = ({ r, c }) => `${r},${c}`;

function cellIn(id, text) {
  const cell = cellOf(text);
  return cell && linkedCell(id, cell.r, cell.c);
}

function cellOf(text) {
  const found = CELL.exec(text);
  return found ? { r: Number(found[1]), c: Number(found[2]) } : null;
}

function atOf(text) {
  const colon = text.lastIndexOf(":");
  const cell = cellOf(text.slice(colon + 1));
  return cell ? { id: text.slice(0, colon), ...cell } : null;
}

/** The learning rate and the number of steps; what cannot be computed is not taken from an address. */
function setOptimizer(part) {
  const { lr, steps } = { lr: firstRate(), steps: 1, ...state.optimizer, ...part };
  const possible = store.served && lr > 0 && lr <= 1 && steps >= 1 && steps <= MAX_STEPS;
  state.optimizer = possible ? { lr, steps } : { lr: firstRate(), steps: 1 };
}

/** The text or ids that an address names; else those that the page opens with. An exported page has no others. */
function askedBy(query) {
  const kind = ["text", "ids"].find((name) => query.get(name));
  const named = kind ? { kind, value: query.get(kind) } : store.opening;
  if (store.served || isOpening(named)) return { kind: named.kind, value: named.value };
  showMessage(`This exported page contains ${quoted(store.opening.value)} only; the link names ${quoted(named.value)}. Run onfoot explore to open that.`);
  return { kind: store.opening.kind, value: store.opening.value };
}

/** Replaces a step, head, cell or token that this run does not have. */
async function settle() {
  const { steps, doc } = state;
  if (!steps.has(state.step)) state.step = FIRST_STEP;
  const step = steps.get(state.step);
  state.head = step.head !== null ? step.head : state.head < doc.model.heads ? state.head : 0;
  const { shape } = store.meta(step.backward || step.forward);
  const rows = shape.length > 1 ? shape[0] : 1;
  if (!state.cell || (state.cell.r >= rows && state.cell.r >= doc.tokens.length)) state.cell = await firstCell(step);
  if (state.token === null || !(state.token in doc.tokens)) state.token = Math.min(state.cell.r, doc.tokens.length - 1);
}

/** Selects the cell of a parameter or an intermediate value, if one was chosen; returns its figure. */
async function showAt() {
  const { at } = state;
  if (!at) return null;
  const step = state.view === "map" && state.steps.get(state.step);
  if (step && step.inside.includes(at.id)) await openInside();
  const figure = [...document.querySelectorAll("#main .figure")].find((element) => element.dataset.tensor === at.id);
  if (!figure) return null;
  await figure.ready;
  figure.dispatchEvent(new CustomEvent("choose", { detail: at }));
  return figure;
}

/** Notes a cell that was chosen in a figure: its token is the one whose prediction is shown. */
function chosenIn(figure, r, c) {
  const isMain = figure.linked === state.linked && !figure.compact;
  state.at = isMain ? null : { id: figure.id, r, c };
  const t = tokenOf(figure.meta, r, c);
  if (t !== null) setToken(t);
  writeHash();
}

/** The token of a cell: that of its row, else of its column; null if neither is a token. */
function tokenOf(meta, r, c) {
  if (meta.axes.length === 2 && meta.axes[0] === "token") return meta.rows ? meta.rows[r] : r;
  if (meta.axes[meta.axes.length - 1] === "token") return meta.columns ? meta.columns[c] : c;
  return null;
}
