// The prediction at the chosen token: its target and the five most probable tokens, in every view.

const MAX_LABEL = 8; // characters of a token where there is little room; the full text is in the title

/** A token's text, shortened with an ellipsis. */
function short(text, length = MAX_LABEL) {
  const characters = [...text];
  return characters.length > length ? `${characters.slice(0, length - 1).join("")}…` : text;
}

const MAX_CONTEXT = 24; // characters

/** The token with the largest loss; not the first, which has nothing before it, unless no other has a target. */
function worstToken() {
  const size = (t) => (t === 0 ? -1 : state.doc.tokens[t].loss ?? -2);
  return state.doc.tokens.reduce((worst, _, t) => (size(t) > size(worst) ? t : worst), 0);
}

/** The sentence that says which error the page follows. */
function errorLine() {
  const { tokens, vocabulary, model } = state.doc;
  const t = worstToken();
  const { target, probability } = tokens[t];
  if (target === null) return null;
  const read = tokens.slice(0, t + 1).map((token) => token.text).join(model.has_tokenizer ? "" : " ");
  const shown = [...read].length > MAX_CONTEXT ? `… ${[...read].slice(-MAX_CONTEXT).join("")}` : read;
  return h(
    "p",
    { class: "error-line", id: "error-line", data: { token: t } },
    "After ", h("b", {}, quoted(shown)), " the model gave ", h("b", {}, quoted(short(vocabulary[target], 16))), " ", h("b", {}, chance(probability)), probability < 0.5 ? ": this error is followed back through the network." : ", its largest error: it is followed back through the network.",
  );
}

const chance = (p) => (p > 0 && p < 0.0005 ? "< 0.1 %" : percent(p));

/** The chips: every token with its loss. One of them is chosen, by click, touch or arrow keys. */
function drawChips() {
  const { tokens } = state.doc;
  const worst = Math.max(...tokens.map((token) => token.loss || 0));
  const chips = tokens.map((token, t) =>
    h(
      "button",
      { type: "button", class: "chip", role: "radio", title: chipTitle(token, t), "aria-label": `Token ${t}, ${token.text}: ${targetText(token)}`, data: { token: t }, onclick: () => chooseToken(t) },
      h("span", { class: "chip-text" }, short(token.text)),
      h("i", { class: "chip-loss", style: { height: `${token.loss === null || !worst ? 0 : Math.max(1, (18 * token.loss) / worst)}px` } }),
    ),
  );
  return h("div", { class: "chips", role: "radiogroup", "aria-label": "Tokens and the loss at each", onkeydown: chipKey }, chips);
}

function targetText(token) {
  if (token.target === null) return "no target";
  return `target ${quoted(state.doc.vocabulary[token.target])}, probability ${chance(token.probability)}, loss ${brief(token.loss)}`;
}

function chipTitle(token, t) {
  const best = token.best.map((one) => `${quoted(state.doc.vocabulary[one.id])} ${chance(one.probability)}`).join(", ");
  return `${t} ${quoted(token.text)}: ${targetText(token)}. Top predictions: ${best}`;
}

function chipKey(event) {
  const last = state.doc.tokens.length - 1;
  const { token } = state;
  const to = { ArrowRight: token + 1, ArrowDown: token + 1, ArrowLeft: token - 1, ArrowUp: token - 1, Home: 0, End: last }[event.key];
  if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  if (to < 0 || to > last) return;
  chooseToken(to);
  document.querySelector(`.chip[data-token="${to}"]`).focus();
}

/** Chooses a token: its row or column is selected in every figure of the view. */
function chooseToken(t) {
  setToken(t);
  const figures = [...document.querySelectorAll("#main .figure")].map((element) => element.figure).filter((figure) => figure && figure.map);
  const groups = new Map(figures.map((figure) => [figure.linked, figure]));
  for (const figure of figures) if (tokenOf(figure.meta, 0, 0) !== null) groups.set(figure.linked, figure);
  for (const [linked, { id, meta }] of groups) {
    const { r, c } = linked.cell;
    if (meta.axes.length === 2 && meta.axes[0] === "token") linked.choose(indexIn(meta.rows, t, r), c);
    else if (TOKENS_ARE_COLUMNS.has(id)) linked.choose(t, c);
    else if (meta.axes[meta.axes.length - 1] === "token") linked.choose(r, indexIn(meta.columns, t, c));
  }
  if (state.view !== "map") writeHash();
}

const indexIn = (shown, t, otherwise) => (!shown ? t : shown.includes(t) ? shown.indexOf(t) : otherwise);

/** Marks the chosen token and shows its prediction. */
function setToken(t) {
  state.token = t;
  for (const chip of document.querySelectorAll(".chip")) {
    const chosen = Number(chip.dataset.token) === t;
    chip.setAttribute("aria-checked", String(chosen));
    chip.tabIndex = chosen ? 0 : -1;
    if (chosen && chip.parentElement.scrollWidth > chip.parentElement.clientWidth) reveal(chip);
  }
  drawPrediction();
}

/** Scrolls the row of chips or tabs, and nothing else, until one is visible. */
function reveal(chip) {
  const row = chip.parentElement;
  const left = chip.offsetLeft - row.offsetLeft;
  if (left < row.scrollLeft) row.scrollLeft = left;
  else if (left + chip.offsetWidth > row.scrollLeft + row.clientWidth) row.scrollLeft = left + chip.offsetWidth - row.clientWidth;
}

function drawPrediction() {
  const { doc, token: t } = state;
  const box = document.getElementById("prediction");
  const token = doc.tokens[t];
  if (!token) return;
  const held = document.activeElement && box.contains(document.activeElement) ? document.activeElement.dataset.by : null;
  const move = (by, text, label) =>
    h("button", { type: "button", class: "quiet", "aria-label": label, disabled: !(t + by in doc.tokens), data: { by }, onclick: () => chooseToken(t + by) }, text);
  box.replaceChildren(
    h("span", { class: "predicted-at" }, move(-1, "‹", "Previous token"), h("b", { title: `token ${t}, ${quoted(token.text)}` }, `${t} ${quoted(short(token.text))}`), move(1, "›", "Next token")),
    h("span", { class: "predicted-target", title: targetText(token) }, targetParts(token)),
    h("ol", { class: "predicted", "aria-label": `Most probable after ${quoted(token.text)}` }, token.best.map((one) => predictionBar(one, token))),
  );
  box.dataset.token = t;
  const again = held && box.querySelector(`[data-by="${held}"]:not(:disabled)`);
  if (again) again.focus();
}

function targetParts(token) {
  if (token.target === null) return "last token: no target";
  const text = state.doc.vocabulary[token.target];
  return ["target ", h("b", { data: { target: token.target } }, quoted(short(text))), " ", h("span", { data: { probability: String(token.probability) } }, chance(token.probability)), afterStep(token)];
}

/** At a stop of the tour about a step of training: what the step makes of the probability. */
function afterStep(token) {
  const stop = tour.at >= 0 && tour.stops[tour.at];
  const isFirst = !state.optimizer || (state.optimizer.lr === firstRate() && state.optimizer.steps === 1);
  if (!stop || stop.after === null || stop.view !== state.view || state.doc.tokens[stop.token] !== token || !isFirst) return "";
  return h("b", { class: "after-step", data: { probability: String(stop.after) } }, ` → ${chance(stop.after)} after the step`);
}

function predictionBar(one, token) {
  const text = state.doc.vocabulary[one.id];
  const isTarget = one.id === token.target;
  return h(
    "li",
    { class: isTarget ? "is-target" : "", title: `${quoted(text)} ${chance(one.probability)}${isTarget ? ", the target" : ""}`, data: { id: one.id, probability: String(one.probability) } },
    h("i", { class: "predicted-bar", "aria-hidden": "true", style: { width: `${100 * one.probability}%` } }),
    h("span", { class: "predicted-text" }, isTarget && h("span", { class: "visually-hidden" }, "target "), short(text, 6)),
    h("span", { class: "predicted-share" }, chance(one.probability)),
  );
}
