// One step of AdamW on this text, and how LoRA's companions begin.

const FIRST_LR = 0.001;

async function drawOneStep() {
  state.optimizer = state.optimizer || { lr: FIRST_LR, steps: 1 };
  const [part, lora] = await Promise.all([store.part("optimizer", state.optimizer), store.part("lora")]);
  return h(
    "article",
    { class: "view one-step" },
    h("h2", {}, "One step"),
    controls(),
    lossLine(part),
    updateSection(part),
    loraSection(lora),
  );
}

function controls() {
  const { lr, steps } = state.optimizer;
  const rate = h("input", { id: "lr", type: "number", min: "0.000001", max: "1", step: "any", value: String(lr), disabled: !store.served });
  const again = async (n) => {
    const asked = { lr: Number(rate.value), steps: n };
    if (!(asked.lr > 0 && asked.lr <= 1)) return say("the learning rate must be above 0 and at most 1");
    const before = state.optimizer;
    state.optimizer = asked;
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
    h("button", { id: "first-step", type: "button", class: "primary", disabled: !store.served, onclick: () => again(1) }, steps === 1 ? "Take a step" : "Start again"),
    h("button", { id: "next-step", type: "button", disabled: !store.served || steps >= 20, onclick: () => again(steps + 1) }, `Take step ${steps + 1}`),
    !store.served && h("span", { class: "aside" }, "This page is a copy: it holds step 1. onfoot explore takes more."),
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
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "line-chart", role: "img", "aria-label": `The loss after 0 to ${steps} steps: ${losses.map((l) => brief(l)).join(", ")}` });
  chart.append(svg("polyline", { points: losses.map((loss, i) => `${x(i)},${y(loss)}`).join(" ") }));
  for (const [i, loss] of losses.entries()) {
    chart.append(svg("circle", { cx: x(i), cy: y(loss), r: i === steps ? 4 : 2.6 }));
    if (i !== 0 && i !== steps) continue;
    const label = svg("text", { x: x(i), y: y(loss) + (i ? -9 : 18), "text-anchor": i ? "end" : "start" });
    label.textContent = brief(loss, 3);
    chart.append(label);
  }
  const rows = [
    ["loss-before", losses[steps - 1], `loss before step ${steps}`],
    ["loss-after", losses[steps], `loss after step ${steps}`],
    ["actual", part.actual, "change"],
    ["predicted", part.predicted, "promised to first order, Σ ∂w ∘ (new w − w)"],
    ["gradient-norm", part.gradient_norm, "norm of all gradients"],
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
    { id: "parameter", onchange: () => showUpdate(box, part, choice.value) },
    part.parameters.map((row) => h("option", { value: row.name }, `${row.name.replace("transformer.", "")}`)),
  );
  const first = part.parameters.find((row) => row.name.endsWith("attn.c_proj.weight")) || part.parameters[0];
  choice.value = state.updateOf && part.parameters.some((row) => row.name === state.updateOf) ? state.updateOf : first.name;
  showUpdate(box, part, choice.value);
  return h("section", { class: "block" }, h("h3", {}, "What AdamW does with a gradient"), h("p", { class: "controls" }, h("label", { for: "parameter" }, "parameter"), choice), box);
}

function showUpdate(box, part, name) {
  state.updateOf = name;
  const row = part.parameters.find((one) => one.name === name);
  const linked = new Linked({ r: 0, c: 0 });
  const sums = h("div", { class: "arithmetic" });
  linked.onchange = (r, c) => arithmetic(sums, part, row, r, c);
  const figures = ["w", "∂w", "m", "v", "update"].map((key) => new Figure({ id: row.arrays[key], linked, terms: false, compact: true, most: 300 }));
  const wide = (store.meta(row.arrays.w).shape.at(-1) || 0) > 64;
  box.replaceChildren(h("div", { class: `five ${wide ? "wide" : ""}` }, figures.map((figure) => figure.element)), sums);
  arithmetic(sums, part, row, 0, 0);
}

/** The five lines of AdamW with the numbers of one weight. */
async function arithmetic(box, part, row, r, c) {
  const [w, g, m, v, after] = await Promise.all(["w", "∂w", "m", "v", "new"].map((key) => store.cell(row.arrays[key], r, c)));
  const { lr, steps, eps, weight_decay: decay } = part;
  const [beta1, beta2] = part.betas;
  const isMatrix = store.meta(row.arrays.w).shape.length > 1;
  const kept = isMatrix ? w * (1 - lr * decay) : w;
  const spread = Math.sqrt(v) / Math.sqrt(1 - beta2 ** steps) + eps;
  const update = ((lr / (1 - beta1 ** steps)) * m) / spread;
  const sum = kept - update;
  const right = Math.abs(sum - after) <= ROUNDING * Math.max(Math.abs(w), Math.abs(update), 1e-300);
  const line = (eq, text, value) => h("tr", {}, h("th", { scope: "row" }, eq), h("td", { class: "of" }, text), h("td", { class: "num" }, brief(value, 8)));
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
        line("ADAM.1", isMatrix ? `w (1 − lr λ) = ${brief(w, 6)} · (1 − ${lr} · ${decay})` : "w: biases and norms do not decay", kept),
        line("ADAM.2", `m = ${beta1} · ${before} + ${brief(1 - beta1, 2)} · ${brief(g, 6)}`, m),
        line("ADAM.3", `v = ${beta2} · ${beforeV} + ${brief(1 - beta2, 2)} · ${brief(g, 6)}²`, v),
        line("ADAM.4", `√v / √(1 − ${beta2}${steps > 1 ? `^${steps}` : ""}) + ${eps}`, spread),
        line("ADAM.5", `lr / (1 − ${beta1}${steps > 1 ? `^${steps}` : ""}) · m / that`, update),
      ),
    ),
    h("p", { class: `sum ${right ? "good" : "bad"}`, data: { sum: String(sum), right: String(right) } }, h("span", { class: "sum-label" }, "new w"), h("span", { class: "sum-value" }, exact(sum)), h("span", { class: "tick" }, right ? "✓ the optimizer’s" : "✗ not the optimizer’s")),
  );
}

function loraSection(lora) {
  const rows = lora.layers.map((layer) =>
    h(
      "tr",
      { data: { layer: layer.name } },
      h("th", { scope: "row" }, h("code", {}, layer.name.replace("transformer.", ""))),
      layer.states.slice(0, 2).flatMap((one, step) =>
        ["u", "∂d", "∂u"].map((key) => h("td", { class: `num ${one.norms[key] === 0 ? "zero" : ""}`, data: { cell: `${step} ${key}`, value: String(one.norms[key]) } }, one.norms[key] === 0 ? "exactly 0" : brief(one.norms[key], 3))),
      ),
    ),
  );
  const first = lora.layers[0];
  const pictures = [0, 1].map((step) => {
    const arrays = first.states[step].arrays;
    const figures = ["∂d", "∂u"].map((key) => new Figure({ id: arrays[key], linked: new Linked(), terms: false, compact: true, most: 220 }));
    return h("div", {}, h("h5", {}, step === 0 ? "at the start" : "after one step"), h("div", { class: "pair tight" }, figures.map((figure) => figure.element)));
  });
  return h(
    "section",
    { class: "block lora" },
    h("h3", {}, "LoRA: how a companion begins"),
    h(
      "p",
      { class: "lead" },
      `Beside each frozen layer stands α a d u of rank ${lora.rank}: ${grouped(lora.trainable)} numbers to train, ${grouped(lora.frozen)} frozen. At the start u = 0, so nothing changes at first, and `,
      math("∂d = α aᵗ Δ uᵗ"),
      " is exactly 0: only u can move. One step later u is no longer 0, and d moves too. Were both 0, neither would ever move.",
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
    h("h4", {}, h("code", {}, first.name.replace("transformer.", ""))),
    h("div", { class: "pair" }, pictures),
    h("p", { class: "aside" }, `The loss after 0 to ${lora.losses.length - 1} steps at learning rate 0.01: ${lora.losses.map((l) => brief(l)).join(", ")}.`),
  );
}
