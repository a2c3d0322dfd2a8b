// The loss curve of the Live view, and the difference from step 0.

function liveNode(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** The losses so far, with the learning rates where they change, and a mark at this step. */
function liveChart(at) {
  const { losses, before } = live;
  const width = Math.max(280, Math.min(860, document.getElementById("main").clientWidth - 48));
  const [height, left, right, top, bottom] = [220, 48, 14, 26, 24];
  const last = losses.length - 1;
  const wide = live.overRun ? Math.max(liveMost(), 1) : Math.min(Math.max(50, Math.ceil((Math.max(last, before ? before.length - 1 : 0) + 1) / 50) * 50), Math.max(live.part.most_steps, 50));
  const all = before ? [...losses, ...before] : losses;
  const high = Math.max(...all);
  const smallest = Math.max(Math.min(...all), 1e-12);
  const low = live.logarithmic ? Math.min(smallest, high / 2) : 0;
  const scale = live.logarithmic ? (loss) => Math.log(Math.max(loss, low)) : (loss) => loss;
  const middle = live.logarithmic ? Math.sqrt(high * low) : (high + low) / 2;
  const x = (t) => left + ((width - left - right) * t) / wide;
  const y = (loss) => top + ((height - top - bottom) * (scale(high) - scale(loss))) / Math.max(scale(high) - scale(low), 1e-12);
  const points = (values) => values.map((loss, t) => `${x(t).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
  const changes = live.overRun ? [] : live.rates.filter(([step]) => step <= last);
  const rates = changes.map(([step, rate]) => `${rate} from step ${step}`).join(", ");
  const label = `Loss of this text: ${brief(losses[0])} at step ${liveLabel(0)}, ${brief(losses[at])} at step ${liveLabel(at)}, ${brief(losses[last])} at step ${liveLabel(last)}.${rates ? ` Learning rate ${rates}.` : ""}`;
  const chart = liveNode("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "live-chart", role: "img", "aria-label": label });
  for (const loss of [high, middle, low]) {
    chart.append(liveNode("line", { class: "grid", x1: left, x2: width - right, y1: y(loss), y2: y(loss) }));
    chart.append(liveNode("text", { x: left - 6, y: y(loss) + 4, "text-anchor": "end" }, brief(loss, 3)));
  }
  for (const t of [0, Math.round(wide / 2), wide]) chart.append(liveNode("text", { x: x(t), y: height - 7, "text-anchor": t === wide ? "end" : t ? "middle" : "start" }, String(liveLabel(t))));
  changes.forEach(([step, rate], i) => {
    const mark = liveNode("g", { class: "rate", "data-rate": `${step}:${rate}` });
    mark.append(liveNode("line", { x1: x(step), x2: x(step), y1: top - 8, y2: height - bottom }));
    mark.append(liveNode("text", { x: x(step) + 4, y: i % 2 ? top + 4 : top - 10, "text-anchor": x(step) > width - 90 ? "end" : "start" }, `lr ${rate}`));
    chart.append(mark);
  });
  if (before) chart.append(liveNode("polyline", { class: "earlier", points: points(before) }));
  chart.append(liveNode("polyline", { class: "curve", points: points(losses), "data-points": losses.length }));
  chart.append(liveNode("line", { class: "now", x1: x(at), x2: x(at), y1: y(losses[at]), y2: height - bottom }));
  chart.append(liveNode("circle", { cx: x(at), cy: y(losses[at]), r: 4.5 }));
  return chart;
}

/** How the predictions and the weights differ from those at step 0. */
function liveDifference() {
  const { part } = live;
  const first = part.checkpoints ? "the first checkpoint" : "step 0";
  const step = part.step !== undefined ? liveLabel(part.step) : 0;
  if (part.step === 0) return h("div", { class: "live-difference", data: { step: "0" } }, h("p", { class: "aside" }, `Play: the predictions and the weights of each step are then shown here, beside those of ${first}.`));
  return h(
    "div",
    { class: "live-difference", data: { step: String(part.step) } },
    h("section", { class: "block" }, h("h3", {}, `Predictions at step ${step}, and at ${first}`), livePredictions(part)),
    h("section", { class: "block" }, h("h3", {}, `Weights at step ${step}: distance from ${first}`), liveWeights(part)),
  );
}

function livePredictions(part) {
  const { tokens, vocabulary } = state.doc;
  const rows = part.tokens.flatMap((now, t) => {
    if (tokens[t].target === null) return [];
    const [before, after] = [Math.exp(-now.first_loss), Math.exp(-now.loss)];
    const best = now.best[0];
    return h(
      "tr",
      { data: { token: t, loss: String(now.loss), first: String(now.first_loss) } },
      h("th", { scope: "row" }, h("code", {}, tokens[t].text), h("span", { class: "where-in" }, ` → ${vocabulary[tokens[t].target]}`)),
      h("td", { class: "num" }, percent(before)),
      h("td", { class: "shares" }, h("span", { class: "length two", "aria-hidden": "true" }, h("i", { style: { width: `${100 * after}%` } }), h("i", { class: "was", style: { left: `${100 * before}%` } }))),
      h("td", { class: "num" }, percent(after)),
      h("td", { class: "num" }, signed(now.loss - now.first_loss, 3)),
      h("td", {}, quoted(vocabulary[now.first_best]), now.first_best !== best.id && [" → ", h("b", {}, quoted(vocabulary[best.id]))]),
    );
  });
  const heads = ["token → target", "before", "", "now", "loss", "top prediction"];
  return liveTable("live-tokens", heads, rows);
}

function liveWeights(part) {
  const largest = Math.max(...part.parameters.map((row) => row.change), 1e-300);
  const rows = part.parameters.map((row) =>
    h(
      "tr",
      { data: { parameter: row.name, change: String(row.change) } },
      h("th", { scope: "row" }, h("code", {}, shortName(row.name))),
      h("td", { class: "shares" }, h("span", { class: "length", "aria-hidden": "true" }, h("i", { style: { width: `${(100 * row.change) / largest}%` } }))),
      h("td", { class: "num" }, brief(row.change, 3)),
      h("td", { class: "num" }, row.ratio === null ? "–" : percent(row.ratio)),
    ),
  );
  return liveTable("live-weights", ["parameter", "", "‖w − w₀‖", "of ‖w₀‖"], rows);
}

function liveTable(id, heads, rows) {
  const head = columnHeads(heads);
  return h("div", { class: "table-scroll", tabindex: "0", role: "group", "aria-label": "Table" }, h("table", { id, class: "figures-table" }, head, h("tbody", {}, rows)));
}
