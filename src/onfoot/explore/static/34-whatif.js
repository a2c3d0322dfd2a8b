// What if: a value is changed, and the promised change of the loss stands beside the true one.

const what = { key: "", target: null, part: null, turn: 0, isFirst: false }; // isFirst: the page chose the target
const WHAT_KINDS = { weight: "a weight", activation: "an activation", score: "an attention score" };
const WHAT_CHANGE = 0.01; // small enough that the promise is nearly kept
const WHAT_TARGET = /^(weight|activation|score) (\S{1,200}) (\d{1,7}) (\d{1,7}) (-?[\d.e+-]{1,24})$/;

async function drawWhatIf() {
  const part = await store.work("whatif", {}, "choices");
  Object.assign(what, { part });
  const key = state.doc.key.split("-")[0]; // the same text at another training step keeps the choice
  if (what.key !== key || !what.target) Object.assign(what, { key, target: await firstTarget(part.choices), isFirst: true });
  const view = h(
    "article",
    { class: "view what-if" },
    h("h2", {}, "What if"),
    h(
      "p",
      { class: "lead" },
      "A gradient is a promise: if this number grows a little, the loss changes by gradient × change. Here the number is really changed, the text is run again, and the two stand side by side. For small changes they agree; for large ones the promise breaks.",
    ),
    store.served ? whatForm(part.choices) : h("p", { class: "aside" }, "Changing a value needs the model, which this exported page does not contain: run onfoot explore to try it. The knock-outs and exercises below are here."),
    h("div", { id: "what-result" }),
    part.knockouts ? knockoutSection(part.knockouts) : knockoutsLater(),
    exerciseSection(),
  );
  if (store.served) requestAnimationFrame(() => askWhatIf());
  return view;
}

/** What is changed at first: the activation and the cell selected in the map, else the first skip, at the token with the largest loss. */
async function firstTarget(choices) {
  const step = state.steps.get(state.step);
  const named = (name) => choices.activation.find((one) => one.name === name);
  const first = state.steps.get("0.5");
  if (!named(step.forward) && first && named(first.forward)) return { kind: "activation", name: first.forward, ...asRow(await firstCell(first)), change: WHAT_CHANGE };
  const found = named(step.forward);
  const one = found || choices.weight.find((weight) => /attn\.[co]_proj\.weight$/.test(weight.name)) || choices.weight[0];
  const { r, c } = (found && state.cell) || { r: 0, c: 0 };
  return clipped({ kind: found ? "activation" : "weight", name: one.name, row: r, column: c, change: WHAT_CHANGE }, one.shape);
}

const asRow = ({ r, c }) => ({ row: r, column: c });

/** The same with a row and a column that the array has; a vector has one row. */
function clipped(target, shape) {
  const [rows, columns] = shape.length === 2 ? shape : [1, shape[0]];
  return { ...target, row: Math.min(target.row, rows - 1), column: Math.min(target.column, columns - 1) };
}

const whatShape = ({ kind, name }) => (what.part.choices[kind].find((one) => one.name === name) || {}).shape;

function whatName(kind, name) {
  const [block, rest] = name.includes(".") && kind !== "weight" ? name.split(".") : [null, name];
  if (kind === "weight") return shortName(name);
  if (kind === "score") return `block ${Number(block) + 1}, head ${Number(rest) + 1}`;
  return `${block === null ? "" : `block ${Number(block) + 1}, `}${rest}`;
}

function whatForm(choices) {
  const { target } = what;
  const options = (kind) => choices[kind].map((one) => h("option", { value: one.name }, whatName(kind, one.name)));
  const kind = h("select", { id: "what-kind" }, Object.entries(WHAT_KINDS).map(([key, text]) => h("option", { value: key }, text)));
  const name = h("select", { id: "what-name" }, options(target.kind));
  const number = (id, value) => h("input", { id, type: "number", min: "0", step: "1", value: String(value) });
  const row = number("what-row", target.row);
  const column = number("what-column", target.column);
  const change = h("input", { id: "what-change", type: "number", step: "any", value: String(target.change) });
  const rowLabel = h("label", { for: "what-row" });
  const columnLabel = h("label", { for: "what-column" });
  kind.value = target.kind;
  name.value = target.name;
  const label = () => {
    const [rows, columns] = what.target.kind === "score" ? ["token", "attends to"] : what.target.kind === "activation" ? ["token", "feature"] : ["row", "column"];
    rowLabel.textContent = rows;
    columnLabel.textContent = columns;
    const shape = whatShape(what.target);
    row.disabled = shape.length < 2;
    row.max = String(shape.length < 2 ? 0 : shape[0] - 1);
    column.max = String(shape[shape.length - 1] - 1);
    row.value = String(what.target.row);
    column.value = String(what.target.column);
  };
  const read = () => {
    what.isFirst = false;
    const chosen = { kind: kind.value, name: name.value, row: Number(row.value), column: Number(column.value), change: Number(change.value) };
    what.target = chosen.kind === what.target.kind && chosen.name === what.target.name ? chosen : clipped(chosen, whatShape(chosen));
    if (chosen.kind === "score" && state.doc.model.causal) what.target.column = Math.min(what.target.column, what.target.row);
    label();
    writeHash();
    askWhatIf();
  };
  kind.addEventListener("change", () => {
    name.replaceChildren(...options(kind.value));
    read();
  });
  for (const element of [name, row, column, change]) element.addEventListener("change", read);
  label();
  return h(
    "form",
    { class: "controls what-form", onsubmit: (event) => (event.preventDefault(), read()) },
    h("label", { for: "what-kind" }, "change"),
    kind,
    h("label", { for: "what-name", class: "visually-hidden" }, "which array"),
    name,
    h("span", { class: "what-pair" }, rowLabel, row),
    h("span", { class: "what-pair" }, columnLabel, column),
    h("span", { class: "what-pair" }, h("label", { for: "what-change" }, "by"), change),
    h("button", { type: "submit", class: "primary" }, "Compute"),
  );
}

/** Asks what the chosen change does, and shows it; of several requests only the last is shown. */
async function askWhatIf() {
  const turn = ++what.turn;
  const place = document.getElementById("what-result");
  if (!place) return;
  place.setAttribute("aria-busy", "true");
  let shown;
  try {
    let found = await store.work("whatif", what.target);
    const kept = what.isFirst && keptChange(found);
    what.isFirst = false;
    if (kept && turn === what.turn) {
      what.target = { ...what.target, change: kept };
      document.getElementById("what-change").value = String(kept);
      found = await store.work("whatif", what.target);
      writeHash();
    }
    shown = whatResult(found);
  } catch (error) {
    shown = [failedNote(error, askWhatIf)];
  }
  if (turn !== what.turn) return;
  place.replaceChildren(...shown);
  place.setAttribute("aria-busy", "false");
}

const KEPT = 0.1; // how far the truth may be from the promise, as a share of it, at the change that the view opens with

/** The largest smaller change at which the promise is kept, if it is not at the first; else 0. */
function keptChange({ sizes }) {
  const isKept = (one) => one.promised === 0 || (one.true !== null && Math.abs(one.true / one.promised - 1) <= KEPT);
  const smaller = sizes.filter((one) => Math.abs(one.change) < WHAT_CHANGE / 2).sort((a, b) => Math.abs(b.change) - Math.abs(a.change));
  const found = sizes.some((one) => one.change === WHAT_CHANGE && !isKept(one)) && smaller.find(isKept);
  return found ? Number(found.change.toPrecision(12)) : 0;
}

function whatResult(found) {
  const { row, column, change } = what.target;
  const cell = whatShape(what.target).length < 2 ? `${column}` : `${row}, ${column}`;
  const rows = found.sizes.map((one) =>
    h(
      "tr",
      { data: { change: String(one.change), promised: String(one.promised), true: String(one.true) } },
      h("td", { class: "num" }, one.change === change ? h("b", {}, signed(one.change, 3)) : h("button", { type: "button", class: "quiet small", title: "Change by this much", onclick: () => changeBy(one.change) }, signed(one.change, 3))),
      h("td", { class: "num" }, signed(one.promised)),
      h("td", { class: "num" }, one.true === null ? "not finite" : signed(one.true)),
      h("td", { class: "num" }, one.true === null || one.promised === 0 ? "–" : brief(one.true / one.promised)),
    ),
  );
  const heads = ["change", "promised", "true", "true ÷ promised"];
  const here = found.sizes.find((one) => one.change === change) || found.sizes[3];
  return [
    h(
      "dl",
      { class: "pairs" },
      h("dt", {}, `${whatName(found.kind, found.name)} [${cell}]`),
      h("dd", { data: { what: "value", value: String(found.value) } }, `${exact(found.value)} → ${brief(found.value + change)}`),
      h("dt", {}, "gradient"),
      h("dd", { data: { what: "gradient", value: String(found.gradient) } }, exact(found.gradient)),
      h("dt", {}, "loss"),
      h("dd", {}, exact(state.doc.loss)),
    ),
    h("p", { role: "status" }, `For a change of ${signed(change, 3)}, the gradient promises ${signed(here.promised)}; the loss really changes by ${here.true === null ? "more than a number can hold" : signed(here.true)}.`),
    h("div", { class: "what-columns" }, liveTable("what-sizes", heads, rows), whatChart(found)),
  ];
}

/** Computes another size of the change, from the table. */
function changeBy(change) {
  const input = document.getElementById("what-change");
  input.value = String(Number(change.toPrecision(12)));
  input.dispatchEvent(new Event("change"));
}

/** The true change of the loss as a curve, and what the gradient promises as a line. */
function whatChart(found) {
  const [width, height] = [340, 220];
  const { curve } = found;
  const reach = Math.abs(curve[0].change);
  const sizes = curve.flatMap((one) => [one.promised, one.true === null ? 0 : one.true]);
  const high = Math.max(...sizes, 0);
  const low = Math.min(...sizes, 0);
  const x = (change) => width / 2 + ((width / 2 - 10) * change) / reach;
  const y = (loss) => 12 + ((height - 34) * (high - loss)) / Math.max(high - low, 1e-300);
  const points = (key) => curve.filter((one) => one[key] !== null).sort((a, b) => a.change - b.change).map((one) => `${x(one.change).toFixed(1)},${y(one[key]).toFixed(1)}`).join(" ");
  const chart = liveNode("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "what-chart", role: "img", "aria-label": `Change of the loss for changes from ${brief(-reach)} to ${brief(reach)}: the promise is a straight line, the truth a curve.` });
  chart.append(liveNode("line", { class: "grid", x1: 10, x2: width - 10, y1: y(0), y2: y(0) }), liveNode("line", { class: "grid", x1: x(0), x2: x(0), y1: 12, y2: height - 22 }));
  chart.append(liveNode("polyline", { class: "promise", points: points("promised") }), liveNode("polyline", { class: "truth", points: points("true") }));
  chart.append(liveNode("text", { x: 10, y: height - 6 }, brief(-reach, 3)), liveNode("text", { x: width - 10, y: height - 6, "text-anchor": "end" }, signed(reach, 3)));
  chart.append(liveNode("text", { x: x(0), y: height - 6, "text-anchor": "middle" }, "0"));
  if (high > 0) chart.append(liveNode("text", { x: x(0) + 4, y: 11 }, signed(high, 3)));
  if (low < 0) chart.append(liveNode("text", { x: x(0) + 4, y: y(low) - 2 }, signed(low, 3)));
  return h("figure", {}, chart, h("figcaption", { class: "aside" }, h("span", { class: "key promise" }, "promised"), h("span", { class: "key truth" }, "true"), ` loss, for changes up to ${brief(reach, 3)}`));
}

/** The knock-outs of one block of a large model, once they are asked for. */
function knockoutsLater() {
  const { blocks, heads } = state.doc.model;
  const place = h("div", {});
  const choice = h("select", { id: "knockout-block" }, Array.from({ length: blocks }, (_, b) => h("option", { value: String(b) }, `block ${b + 1}`)));
  choice.value = String(blocks - 1);
  const ask = async () => {
    const block = choice.value;
    const shown = await store.work("whatif", { block }, "knockouts").then(knockoutSection, (error) => failedNote(error, ask));
    if (choice.value === block && !works.has("knockouts")) place.replaceChildren(...[...shown.childNodes].filter((node) => node.nodeName !== "H3"));
  };
  return h(
    "div",
    { class: "knockouts-later" },
    h("h3", {}, "Knock something out"),
    h("p", { class: "controls" }, h("label", { for: "knockout-block" }, "of"), choice, h("button", { id: "knockout-ask", type: "button", onclick: ask }, `Run the text ${heads + 5} times`)),
    place,
  );
}

function knockoutSection({ rows, loss }) {
  const largest = Math.max(...rows.map((row) => Math.abs(row.true || 0)), 1e-300);
  const body = rows.map((row) =>
    h(
      "tr",
      { data: { knockout: `${row.block} ${row.name}`, promised: String(row.promised), true: String(row.true) } },
      h("th", { scope: "row" }, `block ${row.block + 1}, ${row.name}`),
      h("td", { class: "num" }, signed(row.promised, 3)),
      h("td", { class: "shares" }, bar(row.true || 0, largest)),
      h("td", { class: "num" }, row.true === null ? "not finite" : signed(row.true, 3)),
      h("td", { class: "num" }, row.true === null ? "–" : brief(loss + row.true)),
    ),
  );
  return h(
    "section",
    { class: "block" },
    h("h3", {}, "Knock something out"),
    h("p", { class: "lead" }, "Each row runs the text without one part of the network. The promise is again gradient × change, but leaving out a part is a large change, so it is often wrong, even in its sign."),
    liveTable("knockouts", ["without", "promised", "", "true change", "loss then"], body),
  );
}

const whatText = ({ kind, name, row, column, change }) => `${kind} ${name} ${row} ${column} ${change}`;

remember(
  "whatif",
  () => (state.view === "whatif" && store.served && what.target ? whatText(what.target) : ""),
  async (text) => {
    const found = WHAT_TARGET.exec(text);
    if (!found || !store.served || state.view !== "whatif" || !what.part) return;
    const target = { kind: found[1], name: found[2], row: Number(found[3]), column: Number(found[4]), change: Number(found[5]) };
    if (!whatShape(target)) return;
    what.target = clipped(target, whatShape(target));
    what.isFirst = false;
    await setView("whatif", { push: false });
  },
);
