// What explains training: where the error signal goes, and whose loss a gradient comes from.

async function drawTraining() {
  const part = await store.part("training");
  return h(
    "article",
    { class: "view training" },
    h("h2", {}, "What explains training"),
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
    h("h3", {}, "Through the skip, or through the branch"),
    h(
      "p",
      { class: "lead" },
      "Where an activation goes two ways, its error signal is a sum of two: ",
      math("Δ_5 = Δ_10 + LNᵇ_5(Δ_6)"),
      " and ",
      math("Δ_1 = Δ_5 + LNᵇ_1(Δ_2)"),
      ". The share of a part is its projection on the sum; both add up to 100 %.",
    ),
    h(
      "div",
      { class: "table-scroll" },
      h(
        "table",
        { class: "figures-table forks" },
        h("thead", {}, h("tr", {}, ["at", "", "skip", "branch", "‖Δ‖"].map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, rows),
      ),
    ),
  );
}

/** Two shares of a whole; a part that works against the other reaches to the left of 0. */
function shareBar(skip, branch) {
  const low = Math.min(0, skip, branch);
  const high = Math.max(1, skip, branch);
  const at = (x) => `${(100 * (x - low)) / (high - low)}%`;
  const width = (x) => `${(100 * Math.abs(x)) / (high - low)}%`;
  const begin = branch < 0 || skip < 0 ? 0 : skip;
  return h(
    "span",
    { class: "share", "aria-hidden": "true" },
    h("i", { class: "skip", style: { left: at(Math.min(0, skip)), width: width(skip) } }),
    h("i", { class: "branch", style: { left: at(begin + Math.min(0, branch)), width: width(branch) } }),
  );
}

function tiedSection(tied) {
  const ids = ["∂w_tok, as embedding", "∂w_tok, as logits", "∂w_tok"];
  const linked = new Linked({ r: state.doc.tokens[0].id < 4096 ? state.doc.tokens[0].id : 0, c: 0 });
  const names = { embedding: "as embedding", logits: "as logits" };
  return h(
    "section",
    { class: "block" },
    h("h3", {}, "One table, two gradients"),
    h(
      "p",
      { class: "lead" },
      "The token table is read twice, to look tokens up and to score them: ",
      math("∂w_tok = ohe(a_0)ᵗ Δ_1 + (a_11ᵗ Δ_12)ᵗ"),
      `. The first part touches ${plural(tied.rows_embedding, "row")}, those of the tokens in the text; the second ${tied.rows_logits}.`,
    ),
    h(
      "dl",
      { class: "pairs" },
      Object.keys(names).map((key) => [
        h("dt", {}, names[key]),
        h("dd", { data: { tied: key, value: String(tied.shares[key]) } }, h("b", {}, percent(tied.shares[key])), ` of the gradient, norm ${brief(tied.norms[key])}`),
      ]),
      h("dt", {}, "cosine between them"),
      h("dd", {}, brief(tied.cosine, 3)),
    ),
    h("div", { class: "trio" }, ids.map((id) => new Figure({ id, linked, terms: false, compact: true, most: 360 }).element)),
  );
}

function normSection(part) {
  const rows = part.parameter_norms;
  const largest = Math.max(...rows.map((row) => row.gradient));
  return h(
    "section",
    { class: "block" },
    h("h3", {}, "Gradient norms, by depth and by token"),
    h("p", { class: "lead" }, "From the loss at the top down to the embedding: how long each token's error signal is. The last token has no target, and its signal is exactly 0."),
    h("div", { class: "norms" }, new Figure({ id: part.signal_norms, linked: new Linked({ r: 0, c: 0 }), terms: false, plain: true }).element,
    h(
      "div",
      { class: "table-scroll" },
      h(
        "table",
        { class: "figures-table" },
        h("thead", {}, h("tr", {}, ["parameter", "", "‖∂w‖", "‖∂w‖ / ‖w‖"].map((text) => h("th", { scope: "col" }, text)))),
        h(
          "tbody",
          {},
          rows.map((row) =>
            h(
              "tr",
              { data: { parameter: row.name, norm: String(row.gradient) } },
              h("th", { scope: "row" }, h("code", {}, row.name.replace("transformer.", ""))),
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
  const figure = new Figure({ id, linked, terms: false, plain: true, most: 520 });
  return h(
    "section",
    { class: "block" },
    h("h3", {}, "Whose loss drives a parameter"),
    h(
      "p",
      { class: "lead" },
      "The loss is a sum over targets, and so is each gradient: one backward pass for every target takes it apart. A cell is the share that one token’s loss has in one parameter’s gradient; each row adds up to 100 %, or to 0 where the gradient is 0.",
    ),
    figure.element,
  );
}

function attributionSection({ contributions, swaps }) {
  const largest = Math.max(...contributions.map(Math.abs));
  const { tokens, vocabulary } = state.doc;
  return h(
    "section",
    { class: "block" },
    h("h3", {}, "What each token does to the loss"),
    h("p", { class: "lead" }, "Gradient × input, read from ", math("Δ_0"), ": to first order, how much the loss owes to the token’s own embedding being there."),
    h(
      "ol",
      { class: "attribution" },
      contributions.map((value, t) =>
        h("li", { data: { attribution: t, value: String(value) }, title: exact(value) }, h("span", { class: "token" }, tokens[t].text), bar(value, largest), h("span", { class: "num" }, brief(value, 3))),
      ),
    ),
    h("h4", {}, "Swaps that promise the lowest loss"),
    h("p", { class: "lead" }, "The promise is first order, and a whole token is a large step: beside it stands what the loss really does."),
    h(
      "div",
      { class: "table-scroll" },
      h(
        "table",
        { class: "figures-table" },
        h("thead", {}, h("tr", {}, ["at", "token", "in its place", "promised", "true change"].map((text) => h("th", { scope: "col" }, text)))),
        h(
          "tbody",
          {},
          swaps.map((swap) =>
            h(
              "tr",
              {},
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
