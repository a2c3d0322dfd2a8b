// AdamW steps on this text, and the first steps of LoRA training.

const FIRST_LR = 0.001; // of a small model, and of LoRA layers
const MAX_STEPS = 20; // of a small model; a large one says how many it takes
const firstRate = () => (state.doc ? state.doc.model.first_lr : FIRST_LR);

async function drawOneStep() {
  state.optimizer = state.optimizer || { lr: firstRate(), steps: 1 };
  const asked = store.work("optimizer", state.optimizer);
  const later = state.doc.model.large && store.served; // first the step, then LoRA
  const [part, lora] = later ? [await asked, null] : await Promise.all([asked, store.work("lora")]);
  return h(
    "article",
    { class: "view one-step" },
    h("h2", {}, "One step"),
    h("p", { class: "lead" }, "One step of training on this text: AdamW moves every weight against its gradient. Here is what that does to the loss, and how each weight’s new value is computed."),
    controls(part),
    lossLine(part),
    updateSection(part),
    lora ? loraSection(lora) : loraLater(),
  );
}

/** LoRA of a large model, once it is computed. */
function loraLater() {
  const box = h("section", { class: "block lora" }, h("h3", {}, "LoRA at the start of training"));
  const ask = async () => {
    box.setAttribute("aria-busy", "true");
    const shown = await store.work("lora").then(loraSection, (error) => h("section", { class: "block lora" }, h("h3", {}, "LoRA at the start of training"), failedNote(error, ask)));
    box.replaceChildren(...shown.childNodes);
    box.setAttribute("aria-busy", "false");
  };
  requestAnimationFrame(ask);
  return box;
}

function controls({ most_steps: most }) {
  const { lr, steps } = state.optimizer;
  const rate = h("input", { id: "lr", type: "number", min: "0.000001", max: "1", step: "any", value: String(lr), disabled: !store.served, "aria-describedby": "message", oninput: () => isRate() && showMessage("") });
  const isRate = () => Number(rate.value) > 0 && Number(rate.value) <= 1;
  const takeSteps = async (n) => {
    const wanted = { lr: Number(rate.value), steps: n };
    if (!isRate()) return showMessage("the learning rate must be > 0 and <= 1");
    showMessage("");
    const before = state.optimizer;
    state.optimizer = wanted;
    await setView("step").catch((error) => {
      state.optimizer = before;
      throw error;
    });
    const button = document.getElementById(n === 1 ? "first-step" : "next-step");
    if (button) button.focus();
    return undefined;
  };
  return h(
    "div",
    { class: "controls" },
    h("label", { for: "lr" }, "learning rate"),
    rate,
    h("button", { id: "first-step", type: "button", class: "primary", disabled: !store.served, onclick: () => takeSteps(1) }, steps === 1 ? "Take a step" : "Start over"),
    h("button", { id: "next-step", type: "button", disabled: !store.served || steps >= most, onclick: () => takeSteps(steps + 1) }, `Take step ${steps + 1}`),
    state.doc.model.large && h("span", { class: "aside" }, `At most ${most} steps of a model of this size. Its weights are not copied: the steps are taken again where a weight is read.`),
    !store.served && h("span", { class: "aside" }, "This exported page contains step 1 only; run onfoot explore to take more."),
  );
}

function lossLine(part) {
  const { losses, steps } = part;
  const width = 320;
  const height = 88;
  const low = Math.min(...losses, 0);
  const high = Math.max(...losses);
  const x = (i) => 8 + (i * (width - 16)) / Math.max(losses.length - 1, 1);
  const y = (loss) => 8 + ((height - 16) * (high - loss)) / Math.max(high - low, 1e-12);
  const svg = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "line-chart", role: "img", "aria-label": `Loss after 0 to ${steps} steps: ${losses.map((l) => brief(l)).join(", ")}` });
  chart.append(svg("polyline", { points: losses.map((loss, i) => `${x(i)},${y(loss)}`).join(" ") }));
  for (const [i, loss] of losses.entries()) {
    chart.append(svg("circle", { cx: x(i), cy: y(loss), r: i === steps ? 4 : 2.6 }));
    if (i !== 0 && i !== steps) continue;
    const label = svg("text", { x: x(i), y: y(loss) + (i && y(loss) > 24 ? -9 : 18), "text-anchor": i ? "end" : "start" });
    label.textContent = brief(loss, 3);
    chart.append(label);
  }
  const rows = [
    ["loss-before", losses[steps - 1], `loss before step ${steps}`],
    ["loss-after", losses[steps], `loss after step ${steps}`],
    ["actual", part.actual, "actual change"],
    ["predicted", part.predicted, ["predicted change (first order), ", formula("Σ ∂w ∘ (new w − w)")]],
    ["gradient-norm", part.gradient_norm, "norm of all gradients together"],
  ];
  return h(
    "section",
    { class: "block loss-line" },
    h("dl", { class: "pairs" }, rows.map(([key, value, text]) => [h("dt", {}, text), h("dd", { data: { figure: key, value: String(value) } }, exact(value))])),
    chart,
  );
}

function updateSection(part) {
  const box = h("div", { class: "update" });
  const choice = h(
    "select",
    { id: "parameter", onchange: () => chooseUpdate(box, part, choice.value) },
    part.parameters.map((row) => h("option", { value: row.name }, shortName(row.name))),
  );
  const first = part.parameters.find((row) => /attn\.[co]_proj\.weight$/.test(row.name)) || part.parameters[0];
  choice.value = state.updateOf && part.parameters.some((row) => row.name === state.updateOf) ? state.updateOf : first.name;
  showUpdate(box, part, choice.value);
  return h("section", { class: "block" }, h("h3", {}, "The AdamW update"), h("p", { class: "controls" }, h("label", { for: "parameter" }, "parameter"), choice), box);
}

function chooseUpdate(box, part, name) {
  state.updateOf = name;
  state.at = null;
  pushHash();
  showUpdate(box, part, name);
}

function showUpdate(box, part, name) {
  const row = part.parameters.find((one) => one.name === name);
  const linked = new Linked({ r: 0, c: 0 });
  const sums = h("div", { class: "arithmetic" });
  linked.onchange = (r, c) => arithmetic(sums, part, row, r, c);
  const figures = ["w", "∂w", "m", "v", "update"].map((key) => new Figure({ id: row.arrays[key], linked, terms: false, compact: true, maxHeight: 300 }));
  const wide = (store.meta(row.arrays.w).shape.at(-1) || 0) > 64;
  box.replaceChildren(h("div", { class: `five ${wide ? "wide" : ""}` }, figures.map((figure) => figure.element)), sums);
  arithmetic(sums, part, row, 0, 0);
}

/** The five equations of AdamW with the numbers of one weight. */
async function arithmetic(box, part, row, r, c) {
  const [w, g, m, v, after] = await Promise.all(["w", "∂w", "m", "v", "new"].map((key) => store.cell(row.arrays[key], r, c)));
  const { lr, steps, eps, weight_decay: decay } = part;
  const [beta1, beta2] = part.betas;
  const isMatrix = store.meta(row.arrays.w).shape.length > 1;
  const decayed = isMatrix ? w * (1 - lr * decay) : w;
  const denominator = Math.sqrt(v) / Math.sqrt(1 - beta2 ** steps) + eps;
  const update = ((lr / (1 - beta1 ** steps)) * m) / denominator;
  const sum = decayed - update;
  const right = Math.abs(sum - after) <= ROUNDING * Math.max(Math.abs(w), Math.abs(update), 1e-300);
  const line = (eq, text, numbers, value) => h("tr", {}, h("th", { scope: "row" }, h("span", { class: "eq", tabindex: "0" }, eq)), h("td", {}, formula(text)), h("td", { class: "of" }, numbers), h("td", { class: "num" }, brief(value, 8)));
  const power = steps > 1 ? `^${steps}` : "";
  const before = steps === 1 ? "0" : brief((m - (1 - beta1) * g) / beta1, 5);
  const beforeV = steps === 1 ? "0" : brief((v - (1 - beta2) * g * g) / beta2, 5);
  box.replaceChildren(
    h("p", { class: "number" }, `[${isMatrix ? `${r}, ${c}` : c}]  w = `, h("output", { class: "value", data: { value: String(w) } }, exact(w)), "  →  ", h("output", { class: "value new", data: { value: String(after) } }, exact(after))),
    h(
      "table",
      { class: "arithmetic-table" },
      h(
        "tbody",
        {},
        line("ADAM.1", isMatrix ? "w (1 − lr λ)" : "w", isMatrix ? `${brief(w, 6)} · (1 − ${lr} · ${decay})` : "no weight decay of biases and norms", decayed),
        line("ADAM.2", "m = β_1 m + (1 − β_1) ∂w", `${beta1} · ${before} + ${brief(1 - beta1, 2)} · ${brief(g, 6)}`, m),
        line("ADAM.3", "v = β_2 v + (1 − β_2) (∂w)²", `${beta2} · ${beforeV} + ${brief(1 - beta2, 2)} · (${brief(g, 6)})²`, v),
        line("ADAM.4", "√v / √(1 − β_2^{step}) + ε", `√${brief(v, 5)} / √(1 − ${beta2}${power}) + ${eps}`, denominator),
        line("ADAM.5", "lr / (1 − β_1^{step}) · m / (√v / √(1 − β_2^{step}) + ε)", `${lr} / (1 − ${beta1}${power}) · ${brief(m, 5)} / ${brief(denominator, 5)}`, update),
      ),
    ),
    h("p", { class: `sum ${right ? "good" : "bad"}`, data: { sum: String(sum), right: String(right) } }, h("span", { class: "sum-label" }, "new w"), h("span", { class: "sum-value" }, exact(sum)), h("span", { class: "tick" }, right ? "✓ equals the optimizer’s" : "✗ differs from the optimizer’s")),
  );
}

function loraSection(lora) {
  const rows = lora.layers.map((layer) =>
    h(
      "tr",
      { data: { layer: layer.name } },
      h("th", { scope: "row" }, h("code", {}, shortName(layer.name))),
      layer.states.slice(0, 2).flatMap((one, step) =>
        ["u", "∂d", "∂u"].map((key) => h("td", { class: `num ${one.norms[key] === 0 ? "zero" : ""}`, data: { cell: `${step} ${key}`, value: String(one.norms[key]) } }, one.norms[key] === 0 ? "exactly 0" : brief(one.norms[key], 3))),
      ),
    ),
  );
  const first = lora.layers[0];
  const pictures = [0, 1].map((step) => {
    const arrays = first.states[step].arrays;
    const figures = ["∂d", "∂u"].map((key) => new Figure({ id: arrays[key], linked: new Linked(), terms: false, compact: true, maxHeight: 220 }));
    return h("div", {}, h("h5", {}, step === 0 ? "at the start" : "after one step"), h("div", { class: "pair tight" }, figures.map((figure) => figure.element)));
  });
  return h(
    "section",
    { class: "block lora" },
    h("h3", {}, "LoRA at the start of training"),
    h(
      "p",
      { class: "lead" },
      "LoRA adds ",
      formula("α a d u"),
      ` of rank ${lora.rank} to each frozen layer: ${grouped(lora.trainable)} trainable parameters, ${grouped(lora.frozen)} frozen. At the start `,
      formula("u = 0"),
      ", so the output is unchanged, and ",
      formula("∂d = α aᵗ Δ uᵗ"),
      " is exactly 0: only u is updated. After one step u is no longer 0, and d is updated too. If both were 0, neither would ever change.",
    ),
    h(
      "div",
      { class: "table-scroll" },
      h(
        "table",
        { class: "figures-table lora-table" },
        h(
          "thead",
          {},
          h("tr", {}, h("td", {}), h("th", { colspan: "3", scope: "colgroup" }, "at the start"), h("th", { colspan: "3", scope: "colgroup" }, "after one step")),
          h("tr", {}, h("th", { scope: "col" }, "layer"), [0, 1].flatMap(() => ["‖u‖", "‖∂d‖", "‖∂u‖"].map((text) => h("th", { scope: "col" }, text)))),
        ),
        h("tbody", {}, rows),
      ),
    ),
    h("h4", {}, h("code", {}, shortName(first.name))),
    h("div", { class: "pair" }, pictures),
    h("p", { class: "aside" }, `Loss after 0 to ${lora.losses.length - 1} steps at learning rate 0.01: ${lora.losses.map((l) => brief(l)).join(", ")}.`),
  );
}
