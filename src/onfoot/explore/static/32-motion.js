// Motion: the activations run down the map and the error signal climbs back, row by row, with the norm of each.
// Skips and branches are drawn beside the rows, as paths on which the signal splits and is added.

const MILLISECONDS_PER_ROW = 520;
const SVG = "http://www.w3.org/2000/svg";
const LANE = 6; // pixels between two paths
const NEAREST_LANE = 11; // pixels from the rows to the first path
const flow = { at: null, speed: 1, timer: 0, bar: null, drawing: 0, following: false }; // at: { way: "forward" | "backward", id }
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** The last step of a block, which stands for the block where it is closed. */
const lastOfBlock = (b) => state.doc.steps.findLast((step) => step.block === b && step.head === null).id;

/** The step in whose row a step is shown: its own, or that of its closed block. */
function rowIdOf(id) {
  const { block } = state.steps.get(id);
  return block === null || state.openBlocks.has(block) ? id : lastOfBlock(block);
}

/** The rows that the run passes, by the id of their step: those that are visible, and the heads of closed blocks. */
function flowRows() {
  const rows = [...state.mapElement.querySelectorAll(".row:not([hidden]), .block-head[aria-expanded=false]")];
  return new Map(rows.map((row) => [row.dataset.step || lastOfBlock(Number(row.dataset.block)), row]));
}

/** The order of the run: all rows down, then those with an error signal up. */
function flowOrder() {
  const down = [...flowRows().keys()];
  const up = [...down].reverse().filter((id) => state.steps.get(id).backward);
  return [...down.map((id) => ({ way: "forward", id })), ...up.map((id) => ({ way: "backward", id }))];
}

const flowIndex = (order) => (flow.at ? order.findIndex((one) => one.way === flow.at.way && one.id === rowIdOf(flow.at.id)) : -1);

/** The steps that read the activation of a step: their backward pass makes its error signal. */
function readersOf(id) {
  const to = state.doc.motion.edges.filter(([from]) => from === id).map(([, reader]) => state.steps.get(reader));
  const head = state.steps.get(id).head;
  return to.filter((step) => step && (step.head === null || step.head === head));
}

/** The name of a step, with its block if that is not the block of the step that names it. */
const stepTitle = (step, by) => (step.block === null || step.block === by.block ? step.name : `${step.name} of block ${step.block + 1}`);

function moveFlow(by) {
  const order = flowOrder();
  const to = flowIndex(order) + by;
  flow.at = to >= 0 && to < order.length ? order[to] : to < 0 ? null : flow.at;
  showFlow();
  if (flow.at) followFlow();
  return to < order.length - 1;
}

/** Shows the step of the row that the run is at, once it is drawn; what a fast run has passed meanwhile is left out. */
async function followFlow() {
  if (flow.following) return;
  flow.following = true;
  try {
    while (flow.at && state.mapElement && state.step !== flow.at.id && state.steps.has(flow.at.id)) {
      select(flow.at.id, { open: false });
      await state.detailReady;
      await frame();
    }
  } finally {
    flow.following = false;
  }
}

function playFlow() {
  if (flow.timer) return pauseFlow();
  const order = flowOrder();
  if (flowIndex(order) === order.length - 1) flow.at = null;
  const beat = () => {
    const more = state.mapElement && moveFlow(1);
    flow.timer = more ? setTimeout(beat, MILLISECONDS_PER_ROW / flow.speed) : 0;
    nameFlowButtons();
  };
  beat();
  return undefined;
}

/** Puts the run where the error signal of a step has arrived, so that the next row is the one above. */
function climbFrom(id) {
  if (!state.steps.get(id).backward) return;
  flow.at = { way: "backward", id };
  if (flow.bar && flow.map === state.mapElement) showFlow();
}

function pauseFlow() {
  clearTimeout(flow.timer);
  flow.timer = 0;
  nameFlowButtons();
  if (typeof writeHash === "function") writeHash();
}

function stepFlow(by) {
  pauseFlow();
  moveFlow(by);
}

function flowBar() {
  const button = (name, text, label, onclick) => h("button", { type: "button", class: `quiet ${name}`, "aria-label": label, title: label, onclick }, text);
  const rates = [0.5, 1, 2, 4].map((rate) => h("option", { value: String(rate), ...(rate === flow.speed ? { selected: true } : {}) }, `${rate === 0.5 ? "½" : rate}×`));
  const choice = h("select", { "aria-label": "Speed", class: "speed", onchange: () => (flow.speed = Number(choice.value)) }, rates);
  const buttons = [
    button("back", "◂", "One row back", () => stepFlow(-1)),
    button("play", "▶ Play", "Play", playFlow),
    button("on", "▸", "One row on", () => stepFlow(1)),
    choice,
    button("reset", "Clear", "Clear", clearFlow),
  ];
  return h("div", { class: "motion", role: "group", "aria-label": "Forward and backward through the network" }, h("div", { class: "motion-buttons" }, buttons), h("p", { class: "motion-status" }));
}

function clearFlow() {
  pauseFlow();
  flow.at = null;
  showFlow();
}

function nameFlowButtons() {
  if (!flow.bar) return;
  const play = flow.bar.querySelector(".play");
  play.textContent = flow.timer ? "❙❙ Pause" : "▶ Play";
  play.setAttribute("aria-label", flow.timer ? "Pause" : "Play");
  play.title = play.getAttribute("aria-label");
  play.hidden = calm.matches;
  flow.bar.querySelector(".speed").hidden = calm.matches;
  flow.bar.querySelector(".reset").disabled = !flow.at;
  flow.bar.querySelector(".back").disabled = !flow.at;
  flow.bar.querySelector(".motion-status").setAttribute("aria-live", flow.timer ? "off" : "polite");
}

/** Lights the rows that the run has reached, draws the paths, and says what happens in the current row. */
function showFlow() {
  const map = state.mapElement;
  if (!map) return;
  const order = flowOrder();
  const at = flowIndex(order);
  const reached = new Set(order.slice(0, at + 1).map((one) => `${one.way} ${one.id}`));
  map.classList.toggle("in-motion", at >= 0);
  const rows = new Map([...flowRows()].map(([step, row]) => [row, step]));
  for (const row of map.querySelectorAll(".row, .block-head")) {
    const step = rows.get(row);
    row.classList.toggle("lit-forward", reached.has(`forward ${step}`));
    row.classList.toggle("lit-backward", reached.has(`backward ${step}`));
    row.classList.toggle("now-forward", at >= 0 && flow.at.way === "forward" && flow.at.id === step);
    row.classList.toggle("now-backward", at >= 0 && flow.at.way === "backward" && flow.at.id === step);
  }
  drawPaths(order, at);
  flow.bar.querySelector(".motion-status").replaceChildren(...flowWords());
  nameFlowButtons();
  if (at >= 0) keepInView(map, flowRows().get(rowIdOf(flow.at.id)));
}

/** What happens in the current row, with its norms. */
function flowWords() {
  if (!flow.at) return ["Forward, the activations run down; backward, the error signal climbs."];
  const step = state.steps.get(rowIdOf(flow.at.id));
  const id = flow.at.way === "forward" ? step.forward : step.backward;
  const { norms, sums } = state.doc.motion;
  const { symbol } = store.meta(id);
  const total = id in norms ? ["‖", math(symbol), "‖ = ", h("b", { data: { norm: id, value: String(norms[id]) } }, brief(norms[id], 3))] : [math(symbol)];
  const parts = (sums[id] || []).length <= 3 ? sums[id] || [] : [];
  const added = parts.map((part, i) => [i ? " + " : "", part.label ? math(part.label) : "the branch", ` (${brief(part.norm, 3)})`]);
  const makers = flow.at.way === "backward" ? readersOf(step.id).map((reader) => stepTitle(reader, step)).join(" and ") : "";
  return [
    h("b", { class: flow.at.way }, flow.at.way === "forward" ? "forward ↓ " : "backward ↑ "),
    step.block !== null && !state.openBlocks.has(step.block) ? `Block ${step.block + 1}: ` : `${step.name}${step.block === null ? "" : `, block ${step.block + 1}`}: `,
    ...total.flat(),
    ...(added.length ? [flow.at.way === "forward" ? ", the sum of " : ", added from ", ...added.flat()] : []),
    makers && !added.length ? `, made by the backward pass of ${makers}` : "",
  ];
}

/** Scrolls the map, not the page, until the row is visible. */
function keepInView(map, row) {
  if (!row || map.scrollHeight <= map.clientHeight) return;
  const top = row.offsetTop;
  const seen = Math.min(map.getBoundingClientRect().bottom, lowestSeen()) - map.getBoundingClientRect().top;
  if (top < map.scrollTop + 30) map.scrollTop = top - 60;
  else if (top + row.offsetHeight > map.scrollTop + seen - 30) map.scrollTop = top + row.offsetHeight - seen + 80;
}

/** The connections between rows; those of a closed block are its own. */
function shownEdges(rows) {
  const pairs = state.doc.motion.edges.map((edge) => edge.map(rowIdOf)).filter(([from, to]) => from !== to && rows.has(from) && rows.has(to));
  return [...new Map(pairs.map((pair) => [pair.join(), pair])).values()];
}

/** The connections that pass other rows, and the skips through closed blocks, with a lane for each: short ones nearest to the rows. */
function longEdges(rows, edges) {
  const index = new Map([...rows.keys()].map((id, i) => [id, i]));
  const found = edges
    .map(([from, to]) => ({ from, to, a: index.get(from), b: index.get(to) }))
    .filter(({ to, a, b }) => b - a > 1 || rows.get(to).dataset.block)
    .sort((one, two) => one.b - one.a - (two.b - two.a) || one.a - two.a);
  for (const edge of found) {
    const beside = found.filter((other) => other.lane !== undefined && other.a < edge.b && edge.a < other.b);
    edge.lane = 0;
    while (beside.some((other) => other.lane === edge.lane)) edge.lane++;
  }
  return found;
}

function svgElement(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** Draws the skips and branches: forward on the left, from top to bottom; backward on the right, from bottom to top. */
function drawPaths(order = flowOrder(), at = flowIndex(order)) {
  const map = state.mapElement;
  if (!map) return;
  let drawing = map.querySelector("svg.paths");
  if (!drawing) map.append((drawing = svgElement("svg", { class: "paths", "aria-hidden": "true" })));
  const down = order.filter((one) => one.way === "forward").length;
  const rows = flowRows();
  const position = new Map(order.map((one, i) => [`${one.way} ${one.id}`, i]));
  const edges = shownEdges(rows);
  const long = longEdges(rows, edges);
  map.style.setProperty("--paths", `${NEAREST_LANE + LANE * Math.max(0, ...long.map((edge) => edge.lane)) + 3}px`);
  const key = [...rows].map(([id, row]) => `${id} ${row.offsetTop} ${row.offsetLeft} ${row.offsetWidth}`).join();
  if (drawing.dataset.key !== key) {
    drawing.dataset.key = key;
    drawing.replaceChildren(...long.flatMap((edge) => [pathOf(edge, rows, edges, "forward"), pathOf(edge, rows, edges, "backward")]));
    const bottom = Math.max(...[...rows.values()].map((row) => row.offsetTop + row.offsetHeight));
    drawing.setAttribute("height", String(bottom));
    drawing.setAttribute("width", String(map.clientWidth));
  }
  for (const path of drawing.children) {
    const { way, from, to } = path.dataset;
    const [start, end] = way === "forward" ? [position.get(`forward ${from}`), position.get(`forward ${to}`)] : [position.get(`backward ${to}`) ?? down, position.get(`backward ${from}`)];
    const share = end === undefined ? 0 : Math.min(Math.max((at - start) / (end - start), 0), 1);
    path.dataset.share = share.toFixed(3);
    path.querySelector(".signal").style.strokeDashoffset = String(1 - share);
    path.classList.toggle("arrived", share === 1);
  }
}

/** One connection: a line, the signal on it, a dot where it splits off and a + where it is added. */
function pathOf({ from, to, lane }, rows, edges, way) {
  const isDown = way === "forward";
  const middle = (id) => rows.get(id).offsetTop + Math.min(rows.get(id).offsetHeight / 2, 26);
  const side = (id) => (isDown ? rows.get(id).offsetLeft : rows.get(id).offsetLeft + rows.get(id).offsetWidth);
  const out = isDown ? -1 : 1;
  const edgeOf = isDown ? Math.min(side(from), side(to)) : Math.max(side(from), side(to));
  const x = edgeOf + out * (NEAREST_LANE + lane * LANE);
  const [start, end] = isDown ? [from, to] : [to, from];
  const [y0, y1] = [middle(start) + (isDown ? 5 : -5), middle(end) + (isDown ? -5 : 5)];
  const bend = isDown ? 5 : -5;
  const line = `M ${side(start)} ${y0} H ${x - out * 5} Q ${x} ${y0} ${x} ${y0 + bend} V ${y1 - bend} Q ${x} ${y1} ${x - out * 5} ${y1} H ${side(end)}`;
  const group = svgElement("g", { class: `path ${way}` });
  Object.assign(group.dataset, { way, from, to });
  const isBlock = Boolean(rows.get(to).dataset.block); // its skip and its branch are one connection here
  const several = (id, end) => isBlock || edges.filter((edge) => edge[end] === id).length > 1;
  const [splits, adds] = isDown ? [several(from, 0), several(to, 1)] : [several(to, 1), several(from, 0)];
  group.append(svgElement("path", { class: "track", d: line }), svgElement("path", { class: "signal", d: line, pathLength: "1", "stroke-dasharray": "1" }));
  if (splits) group.append(svgElement("circle", { class: "split", cx: side(start), cy: y0, r: 3 }));
  if (adds) group.append(svgElement("path", { class: "plus", d: `M ${side(end) + out * 5 - 4} ${y1} h 8 M ${side(end) + out * 5} ${y1 - 4} v 8` }));
  return group;
}

/** Writes into a row its norms, and which steps' backward pass made its error signal. */
function decorateRow(row, id) {
  if (!row.firstChild || row.querySelector(".flow")) return;
  const step = state.steps.get(id);
  const { norms } = state.doc.motion;
  const norm = (way, id) => id && id in norms && h("span", { class: `flow-${way}`, data: { value: String(norms[id]) } }, "‖", math(store.meta(id).symbol), "‖ ", h("b", {}, brief(norms[id], 3)));
  const makers = step.backward ? readersOf(step.id).map((reader) => stepTitle(reader, step)) : [];
  const says = `The error signal of this row was made by the backward pass of ${makers.join(" and ")}.`;
  if (row.dataset.step) row.append(h("div", { class: "made-by", title: makers.length ? says : "" }, makers.length > 0 && `↑ made by ${makers.join(" + ")}`));
  row.append(h("div", { class: "flow" }, norm("forward", step.forward) || h("span"), norm("backward", step.backward) || h("span")));
}

/** Says in the open step which steps' backward pass made its gradients. */
function decorateDetail() {
  const detail = document.querySelector(".detail");
  const head = detail && detail.querySelector(".detail-head");
  if (!head || detail.querySelector(".made-of")) return;
  const step = state.steps.get(state.step);
  const makers = step.backward ? readersOf(step.id) : [];
  if (!makers.length) return;
  const link = (maker) => h("button", { type: "button", class: "quiet small", onclick: () => select(maker.id) }, stepTitle(maker, step));
  head.after(
    h(
      "p",
      { class: "made-of aside" },
      math(store.meta(step.backward).symbol),
      " is the gradient of the loss at this step’s output. It was made by the backward pass of ",
      makers.map((maker, i) => [i ? " and " : "", link(maker)]),
      step.parameters.length > 0 ? "; the gradients of the parameters below are made by this step’s own." : ".",
    ),
  );
}

function decorateMap() {
  const map = state.mapElement;
  const panel = document.getElementById("panel");
  if (!map || !map.isConnected || !state.doc.motion) {
    if (flow.timer) pauseFlow();
    return;
  }
  decorateDetail();
  if (flow.bar && flow.bar.isConnected && flow.map === map) return;
  flow.map = map;
  flow.bar = flowBar();
  panel.prepend(flow.bar);
  const refresh = () => {
    if (map !== state.mapElement) return; // another view was opened
    for (const [id, row] of flowRows()) decorateRow(row, id);
    cancelAnimationFrame(flow.drawing);
    flow.drawing = requestAnimationFrame(() => map.isConnected && showFlow());
  };
  new MutationObserver(refresh).observe(map, { subtree: true, attributes: true, attributeFilter: ["hidden", "aria-expanded"] });
  new ResizeObserver(refresh).observe(map);
  refresh();
  scrollMap(); // the rows are taller now
}

/** Where the run is, for the address. */
function setUpMotion() {
  const read = (value) => {
    const [way, id] = [value.split(" ")[0], value.split(" ").slice(1).join(" ")];
    flow.at = way === "forward" || way === "backward" ? { way, id } : null;
    if (state.mapElement && flow.bar) showFlow();
  };
  remember("run", () => (flow.at && !flow.timer ? `${flow.at.way} ${flow.at.id}` : ""), read);
  calm.addEventListener("change", () => {
    pauseFlow();
    nameFlowButtons();
  });
  whenDrawn(decorateMap);
}

setUpMotion();
