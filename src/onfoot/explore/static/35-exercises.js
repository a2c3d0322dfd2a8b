// Exercises with a score: predict the sign of a change, and find the hidden mistake.

const SCORE_PLACE = "onfoot explore score";
const MISTAKE_POINTS = 10;
const EXERCISES = 1000;
const exercises = { memory: null, sign: null, mistake: null };

/** The score: in the browser's storage, or in memory where that is forbidden. */
function readScore() {
  const none = { sign: { right: 0, asked: 0 }, mistake: { points: 0, asked: 0 } };
  try {
    const kept = JSON.parse(localStorage.getItem(SCORE_PLACE)) || {};
    const whole = (x) => (Number.isInteger(x) && x >= 0 ? x : 0);
    for (const [kind, parts] of Object.entries(none)) for (const name of Object.keys(parts)) parts[name] = whole((kept[kind] || {})[name]);
    return exercises.memory || none;
  } catch {
    return exercises.memory || none;
  }
}

function writeScore(score) {
  exercises.memory = score;
  try {
    localStorage.setItem(SCORE_PLACE, JSON.stringify(score));
    exercises.memory = null;
  } catch {
    // forbidden: it stays in memory
  }
  showScore();
}

function showScore() {
  const place = document.getElementById("score");
  if (!place) return;
  const { sign, mistake } = readScore();
  place.replaceChildren(
    h("span", { data: { score: "sign", value: `${sign.right}/${sign.asked}` } }, `signs: ${sign.right} of ${sign.asked} right`),
    " · ",
    h("span", { data: { score: "mistake", value: `${mistake.points}/${mistake.asked}` } }, `mistakes: ${plural(mistake.points, "point")} from ${mistake.asked}`),
  );
}

function exerciseSection() {
  const signPlace = h("div", { id: "sign-exercise", class: "exercise" });
  const mistakePlace = h("div", { id: "mistake-exercise", class: "exercise" });
  requestAnimationFrame(() => {
    showScore();
    for (const kind of ["sign", "mistake"]) state.doc.model.large && store.served ? offerExercise(kind) : askExercise(kind);
  });
  const reset = h("button", { id: "score-reset", type: "button", class: "small", onclick: () => writeScore({ sign: { right: 0, asked: 0 }, mistake: { points: 0, asked: 0 } }) }, "Reset");
  return h(
    "section",
    { class: "block exercises" },
    h("h3", {}, "Exercises"),
    h("p", { class: "score", role: "status" }, h("b", {}, "Score "), h("span", { id: "score" }), " ", reset),
    h("div", { class: "exercise-columns" }, signPlace, mistakePlace),
  );
}

const EXERCISE_NAMES = { sign: "Rises or falls?", mistake: "Find the hidden mistake" };

/** An exercise of a large model takes a while: it begins when it is asked for. */
function offerExercise(kind) {
  const place = document.getElementById(`${kind}-exercise`);
  if (place) place.replaceChildren(h("h4", {}, EXERCISE_NAMES[kind]), h("p", {}, h("button", { type: "button", data: { start: kind }, onclick: () => askExercise(kind) }, "Start")));
}

/** Asks for the next exercise of a kind: its number is how many were answered before. */
async function askExercise(kind) {
  const number = readScore()[kind].asked % EXERCISES;
  const place = document.getElementById(`${kind}-exercise`);
  const { key } = state.doc;
  let shown;
  try {
    const found = await store.work("exercise", { kind, number }, `exercise ${kind}`.replace(" ", "-"));
    if (state.doc.key !== key) return;
    exercises[kind] = found;
    shown = kind === "sign" ? signExercise(found) : mistakeExercise(found);
  } catch (error) {
    if (error instanceof StoppedError && works.has(`exercise-${kind}`)) return; // newer work stopped it
    if (error instanceof StoppedError) return offerExercise(kind);
    const text = store.served ? error.message : "This exported page has no more of these; run onfoot explore for more, or reset the score.";
    shown = [h("h4", {}, EXERCISE_NAMES[kind]), h("p", { class: "aside" }, text)];
  }
  if (place) place.replaceChildren(...shown);
}

// rises or falls?

function signQuestion({ what: kind, target, value, change, hints }) {
  const { tokens, vocabulary } = state.doc;
  const [hint] = hints;
  const token = (t) => `token ${t} ${quoted(tokens[t].text)}`;
  const grows = ` is ${brief(value)}. It grows by ${change}. What does the loss do?`;
  if (kind === "logit") {
    return [
      h("p", {}, `At ${token(target.row)}, the logit of ${quoted(vocabulary[hint.chosen])}${grows}`),
      h("p", { class: "aside" }, `The target there is ${quoted(vocabulary[hint.target])}; the model gives ${quoted(vocabulary[hint.chosen])} ${percent(hint.probability)}.`),
    ];
  }
  if (kind === "score") {
    return [
      h("p", {}, `In ${whatName("score", target.name)}, the score with which ${token(target.row)} looks at ${token(target.column)}${grows}`),
      h("p", { class: "aside" }, `Attention to that token costs ${brief(hint.drho)} of loss per unit (its ∂ρ); to all tokens it looks at, ${brief(hint.mean)} on average, weighted by ρ. A higher score moves attention to it from the others.`),
    ];
  }
  const rows = hints.map((one) => h("tr", {}, h("td", {}, token(one.token)), h("td", { class: "num" }, signed(one.a)), h("td", { class: "num" }, signed(one.delta))));
  return [
    h("p", {}, "The weight ", h("code", {}, `${whatName("weight", target.name)}[${target.row}, ${target.column}]`), grows),
    h("p", { class: "aside" }, "Its gradient is the sum of a × Δ over all tokens: what comes in, times the error signal of what goes out. The largest terms:"),
    liveTable("sign-terms", ["at", "a", "Δ"], rows),
  ];
}

function signExercise(found) {
  const answer = (rises) => {
    const right = rises === found.answer.true > 0;
    const score = readScore();
    score.sign = { right: score.sign.right + (right ? 1 : 0), asked: score.sign.asked + 1 };
    for (const button of buttons) button.disabled = true;
    verdict.replaceChildren(...signVerdict(found, right));
    verdict.dataset.right = String(right);
    writeScore(score);
    verdict.querySelector("button").focus();
  };
  const buttons = [["It rises", true], ["It falls", false]].map(([text, rises]) => h("button", { type: "button", class: "primary", data: { rises: String(rises) }, onclick: () => answer(rises) }, text));
  const verdict = h("div", { class: "verdict", role: "status" });
  return [h("h4", {}, "Rises or falls?"), ...signQuestion(found), h("p", { class: "controls" }, buttons), verdict];
}

function signVerdict(found, right) {
  const { gradient, promised, true: change } = found.answer;
  const tryIt = () => {
    what.target = { ...found.target, change: found.change };
    setView("whatif");
  };
  return [
    h("p", { class: right ? "good" : "bad" }, h("b", {}, right ? "✓ Right" : "✗ Wrong"), ` The loss ${change > 0 ? "rises" : "falls"}.`),
    h("p", { class: "aside", data: { gradient: String(gradient), promised: String(promised), true: String(change) } }, `Gradient ${brief(gradient)} × ${found.change} promises ${signed(promised)}; the true change is ${signed(change)}.`),
    h("p", { class: "controls" }, h("button", { type: "button", class: "next", onclick: () => askExercise("sign") }, "Next"), store.served && h("button", { type: "button", onclick: tryIt }, "Try it above")),
  ];
}

// find the hidden mistake

function mistakeExercise(found) {
  let checks = 0;
  const rows = found.rows.map((row, i) => {
    const id = `planted-${i}`;
    const choice = h("input", { type: "radio", name: "planted", id, value: String(i) });
    choice.checked = i === 0;
    return h("tr", { data: { row: i } }, h("td", {}, choice), h("th", { scope: "row" }, h("label", { for: id }, rowName(row))), h("td", { class: "num" }, brief(row.norm, 3)), h("td", { class: "num result" }));
  });
  const reveal = (i) => {
    const row = found.rows[i];
    rows[i].className = row.wrong ? "wrong" : "right";
    rows[i].querySelector(".result").textContent = `${row.wrong ? "✗" : "✓"} ${relativeError(row.error)}`;
  };
  const chosen = () => rows.findIndex((row) => row.querySelector("input").checked);
  const left = () => Math.max(MISTAKE_POINTS - checks, 1);
  const worth = h("span", { class: "aside", role: "status" }, `worth ${plural(left(), "point")}`);
  const check = h("button", { id: "planted-check", type: "button", onclick: () => {
    const i = chosen();
    if (rows[i].className) return;
    checks += 1;
    reveal(i);
    worth.textContent = `${found.rows[i].wrong ? "wrong" : "right"}, relative error ${relativeError(found.rows[i].error)}; now worth ${plural(left(), "point")}`;
  } }, "Check this row");
  const point = h("button", { id: "planted-point", type: "button", class: "primary", onclick: () => {
    const right = chosen() === found.answer;
    const score = readScore();
    score.mistake = { points: score.mistake.points + (right ? left() : 0), asked: score.mistake.asked + 1 };
    for (const i of found.rows.keys()) reveal(i);
    rows[found.answer].classList.add("first");
    for (const button of [check, point]) button.disabled = true;
    for (const row of rows) row.querySelector("input").disabled = true;
    verdict.replaceChildren(...mistakeVerdict(found, right, left()));
    verdict.dataset.right = String(right);
    worth.textContent = "";
    writeScore(score);
    verdict.querySelector("button").focus();
  } }, "This is the first wrong row");
  const verdict = h("div", { class: "verdict", role: "status" });
  return [
    h("h4", {}, "Find the hidden mistake"),
    h("p", {}, "One known mistake is hidden in one place of this backward pass. Point at the first wrong gradient: everything below it may be wrong too. Checking a row costs a point, so halve what is left."),
    h("p", { class: "controls" }, check, point, worth),
    verdict,
    h("div", { class: "planted-rows", tabindex: "0", role: "group", "aria-label": "Gradients in backward order" }, h("table", { class: "figures-table errors" }, columnHeads(["", "gradient", "norm", "check"]), h("tbody", {}, rows))),
  ];
}

function mistakeVerdict(found, right, points) {
  const where = found.block === null ? "" : `, in block ${found.block + 1}`;
  const equation = found.equation_text && h("p", { class: "aside" }, "It violates ", equationName(found.equation), ": ", found.formula ? formula(found.formula) : found.equation_text, ` (${equationOf(found.equation)})`);
  return [
    h("p", { class: right ? "good" : "bad" }, h("b", {}, right ? `✓ Right, ${plural(points, "point")}` : "✗ Not the first wrong one"), " The first is ", rowName(found.rows[found.answer]), "."),
    h("p", {}, h("b", {}, found.name), ` (${found.layer}${where}). ${found.explains}`),
    h("p", {}, `Correct: ${found.fix}`),
    equation,
    h("p", { class: "controls" }, h("button", { type: "button", class: "next", onclick: () => askExercise("mistake") }, "Next")),
  ].filter(Boolean);
}
