// The Training view: how the error signal splits at skip connections, and which loss each gradient comes from.

async function drawTraining() {
  const part = await store.work("training");
  return h(
    "article",
    { class: "view training" },
    h("h2", {}, "Where the gradients come from"),
    forkSection(part.forks),
    part.tied && tiedSection(part.tied),
    normSection(part),
    driverSection(part.drivers),
    attributionSection(part.attribution),
  );
}

function forkSection(forks) {
  const rows = forks.map((fork) =>
    h(
      "tr",
      { data: { block: fork.block, at: fork.at, skip: String(fork.skip_share), branch: String(fork.branch_share) } },
      h("th", { scope: "row" }, math(fork.at), h("span", { class: "where-in" }, ` block ${fork.block + 1}`)),
      h("td", { class: "shares" }, shareBar(fork.skip_share, fork.branch_share)),
      h("td", { class: "num skip" }, percent(fork.skip_share)),
      h("td", { class: "num branch" }, percent(fork.branch_share), h("span", { class: "where-in" }, ` ${fork.branch}`)),
      h("td", { class: "num" }, brief(fork.norm, 3)),
    ),
  );
  return h(
    "section",
    { class: "block" },
    h("h3", {}, "Skip connection and branch"),
    h(
      "p",
      { class: "lead" },
      "An activation that feeds both a skip connection and a branch has the sum of their error signals: ",
      math(`Δ_5 = Δ_10 + ${normName()}ᵇ_5(Δ_6)`),
      " and ",
      math(`Δ_1 = Δ_5 + ${normName()}ᵇ_1(Δ_2)`),
      ". The share of each part is its projection onto the sum; the two add up to 100 %.",
    ),
    h(
      "div",
      { class: "table-scroll" },
      h(
        "table",
        { class: "figures-table forks" },
        columnHeads(["error signal", "", "skip", "branch", "‖Δ‖"]),
        h("tbody", {}, rows),
      ),
    ),
  );
}

/** Two shares as a bar; a negative share extends to the left of 0. */
function shareBar(skip, branch) {
  const low = Math.min(0, skip, branch);
  const high = Math.max(1, skip, branch);
  const at = (x) => `${(100 * (x - low)) / (high - low)}%`;
  const width = (x) => `${(100 * Math.abs(x)) / (high - low)}%`;
  const start = branch < 0 || skip < 0 ? 0 : skip;
  return h(
    "span",
    { class: "share", "aria-hidden": "true" },
    h("i", { class: "skip", style: { left: at(Math.min(0, skip)), width: width(skip) } }),
    h("i", { class: "branch", style: { left: at(start + Math.min(0, branch)), width: width(branch) } }),
  );
}

function tiedSection(tied) {
  const ids = ["∂w_tok, as embedding", "∂w_tok, as logits", "∂w_tok"];
  const [{ id: first }] = state.doc.tokens;
  const { rows } = store.meta("∂w_tok"); // of a large table, only some
  const linked = new Linked({ r: rows ? Math.max(rows.indexOf(first), 0) : first, c: 0 });
  const names = { embedding: "as embedding", logits: "as logits" };
  return h(
    "section",
    { class: "block" },
    h("h3", {}, "Tied embedding: one table, two gradients"),
    h(
      "p",
      { class: "lead" },
      "The token table is used twice, as embedding and as logits layer: ",
      math("∂w_tok = ohe(a_0)ᵗ Δ_1 + (a_11ᵗ Δ_12)ᵗ"),
      `. The first part is nonzero in ${plural(tied.rows_embedding, "row")}, those of the tokens in the text; the second in ${grouped(tied.rows_logits)}.`,
    ),
    h(
      "dl",
      { class: "pairs" },
      Object.keys(names).map((key) => [
        h("dt", {}, names[key]),
        h("dd", { data: { tied: key, value: String(tied.shares[key]) } }, h("b", {}, percent(tied.shares[key])), ` of the gradient, norm ${brief(tied.norms[key])}`),
      ]),
      h("dt", {}, "cosine similarity"),
      h("dd", {}, brief(tied.cosine, 3)),
    ),
    h("div", { class: "trio" }, ids.map((id) => new Figure({ id, linked, terms: false, compact: true, maxHeight: 360 }).element)),
  );
}

function normSection(part) {
  const rows = part.parameter_norms;
  const largest = Math.max(...rows.map((row) => row.gradient));
  return h(
    "section",
    { class: "block" },
    h("h3", {}, "Gradient norms by depth and token"),
    h("p", { class: "lead" }, "The norm of each token's error signal, from the loss at the top down to the embedding. The last token has no target, so its error signal is exactly 0."),
    h("div", { class: "norms" }, new Figure({ id: part.signal_norms, linked: new Linked({ r: 0, c: 0 }), terms: false, plain: true }).element,
    h(
      "div",
      { class: "table-scroll" },
      h(
        "table",
        { class: "figures-table" },
        columnHeads(["parameter", "", "‖∂w‖", "‖∂w‖ / ‖w‖"]),
        h(
          "tbody",
          {},
          rows.map((row) =>
            h(
              "tr",
              { data: { parameter: row.name, norm: String(row.gradient) } },
              h("th", { scope: "row" }, h("code", {}, shortName(row.name))),
              h("td", { class: "shares" }, h("span", { class: "length", "aria-hidden": "true" }, h("i", { style: { width: `${(100 * row.gradient) / largest}%` } }))),
              h("td", { class: "num" }, brief(row.gradient)),
              h("td", { class: "num" }, row.ratio === null ? "–" : brief(row.ratio, 3)),
            ),
          ),
        ),
      ),
    )),
  );
}

function driverSection(id) {
  const linked = new Linked({ r: 0, c: 0 });
  const figure = new Figure({ id, linked, terms: false, plain: true, maxHeight: 520 });
  return h(
    "section",
    { class: "block" },
    h("h3", {}, "Which token’s loss drives each gradient"),
    h(
      "p",
      { class: "lead" },
      "The loss is a sum over targets, and so is each gradient: one backward pass per target gives its part. A cell is the share of one token’s loss in one parameter’s gradient; each row adds up to 100 %, or to 0 if the gradient is 0.",
    ),
    figure.element,
  );
}

function attributionSection({ contributions, swaps, tried, lower }) {
  const largest = Math.max(...contributions.map(Math.abs));
  const { tokens, vocabulary } = state.doc;
  return h(
    "section",
    { class: "block" },
    h("h3", {}, "Token attribution"),
    h("p", { class: "lead" }, "Gradient × input, read from ", math("Δ_0"), ": the first-order contribution of each token’s embedding to the loss."),
    h(
      "ol",
      { class: "attribution" },
      contributions.map((value, t) =>
        h("li", { data: { attribution: t, value: String(value) }, title: exact(value) }, h("span", { class: "token", title: tokens[t].text }, tokens[t].text), bar(value, largest), h("span", { class: "num" }, brief(value, 3))),
      ),
    ),
    h("h4", {}, "Swaps that lower the loss"),
    h("p", { class: "lead" }, `${lower ? grouped(lower) : "None"} of ${plural(tried, "swap")} ${lower === 1 ? "lowers" : lower ? "lower" : "lowers"} the loss${lower > swaps.length ? `, and these lower it most` : ""}. Special tokens are left out. The prediction is first order, but replacing a token is a large step: compare it with the actual change.`),
    swaps.length > 0 && h(
      "div",
      { class: "table-scroll" },
      h(
        "table",
        { class: "figures-table" },
        columnHeads(["position", "token", "replacement", "predicted change", "actual change"]),
        h(
          "tbody",
          {},
          swaps.map((swap) =>
            h(
              "tr",
              { data: { swap: `${swap.position} ${swap.new}`, actual: String(swap.actual) } },
              h("td", { class: "num" }, String(swap.position)),
              h("td", {}, quoted(vocabulary[swap.old])),
              h("td", {}, quoted(vocabulary[swap.new])),
              h("td", { class: "num" }, brief(swap.predicted)),
              h("td", { class: "num" }, brief(swap.actual)),
            ),
          ),
        ),
      ),
    ),
  );
}
