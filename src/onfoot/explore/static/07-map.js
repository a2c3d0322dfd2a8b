// The map: the steps of the network as a column, forward on the left (down), backward on the right (up).

function drawMap() {
  const list = h("div", { class: "map", role: "tree", "aria-label": "Steps of the network" });
  const { steps, model } = state.doc;
  list.append(h("div", { class: "lanes", "aria-hidden": "true" }, h("span", { class: "down" }, "forward ↓"), h("span", { class: "up" }, "↑ backward")));
  let block = null;
  for (const step of steps) {
    if (step.block !== block && step.block !== null) list.append(blockHead(step.block, model.blocks));
    block = step.block;
    if (step.head === 0 && firstOfHead(step)) list.append(headChoice(step.block));
    list.append(mapRow(step));
  }
  list.addEventListener("keydown", mapKey);
  state.mapElement = list;
  showRows();
  return list;
}

const firstOfHead = (step) => step.id.endsWith(".a_2");

function blockHead(b, n) {
  const open = state.openBlocks.has(b);
  return h(
    "button",
    {
      class: "block-head",
      type: "button",
      role: "treeitem",
      id: `block-${b}`,
      data: { block: b },
      "aria-level": "1",
      "aria-expanded": String(open),
      tabindex: "-1",
      onclick: () => toggleBlock(b),
    },
    `Block ${b + 1}`,
    h("span", {}, ` of ${n}`),
  );
}

function toggleBlock(b) {
  if (state.openBlocks.has(b)) state.openBlocks.delete(b);
  else state.openBlocks.add(b);
  showRows();
}

/** The buttons that choose the head shown in the map. */
function headChoice(b) {
  const buttons = Array.from({ length: state.doc.model.heads }, (_, head) =>
    h("button", { type: "button", class: "head", role: "treeitem", "aria-level": "3", tabindex: "-1", "aria-label": `Head ${head + 1}`, data: { head }, "aria-selected": String(head === state.head), onclick: () => chooseHead(head, b) }, String(head + 1)),
  );
  return h("div", { class: "heads", data: { block: b }, role: "group", "aria-label": `Head of block ${b + 1}` }, h("span", { "aria-hidden": "true" }, "head"), buttons);
}

function chooseHead(head, b) {
  state.head = head;
  const now = state.steps.get(state.step);
  if (now.head !== null) select(now.id.replace(/^(\d+)\.\d+\./, `$1.${head}.`), { push: true });
  else if (b !== undefined) select(`${b}.${head}.a_2`, { push: true });
  showRows();
}

/** A row of the map; filled when it is first shown. */
function mapRow(step) {
  return h(
    "div",
    {
      class: `row ${step.head === null ? "" : "inner"}`,
      role: "treeitem",
      id: `row-${step.id}`,
      tabindex: "-1",
      "aria-level": step.block === null ? "1" : step.head === null ? "2" : "3",
      "aria-selected": "false",
      data: { step: step.id },
      onclick: () => select(step.id, { focus: true, push: true }),
    },
  );
}

function fillRow(row, step) {
  const forward = store.meta(step.forward);
  const backward = step.backward && store.meta(step.backward);
  const parts = [
    h("div", { class: "name" }, step.name, h("span", { class: "shape" }, times(forward.shape)), h("span", { class: "proven-mark", "aria-hidden": "true" })),
    h("div", { class: "forward" }, math(forward.formula || forward.symbol)),
    h("div", { class: "backward" }, backward ? math(step.id === "tok" || step.id === "pos" ? backward.symbol : backward.formula || backward.symbol) : ""),
    step.parameters.length > 0 &&
      h("div", { class: "owned" }, step.parameters.map(([, gradient]) => h("span", { class: "owned-one" }, math(store.meta(gradient).symbol)))),
  ];
  row.append(...parts.filter(Boolean));
  markProven(step.id, row);
}

/** Shows the rows of open blocks and of the chosen head, and marks the selected one. */
function showRows() {
  const map = state.mapElement;
  if (!map) return;
  const now = state.steps.get(state.step);
  for (const element of map.children) {
    const step = state.steps.get(element.dataset.step);
    if (step) {
      const inOpen = step.block === null || state.openBlocks.has(step.block);
      element.hidden = !inOpen || (step.head !== null && (step.head !== state.head || !state.openHeads.has(step.block)));
      if (!element.hidden && !element.firstChild) fillRow(element, step);
      const chosen = step === now;
      element.setAttribute("aria-selected", String(chosen));
      if (step.id.endsWith(".3") && step.head === null) element.setAttribute("aria-expanded", String(state.openHeads.has(step.block)));
    } else if (element.classList.contains("heads")) {
      const b = Number(element.dataset.block);
      element.hidden = !state.openBlocks.has(b) || !state.openHeads.has(b);
      for (const button of element.querySelectorAll("button")) button.setAttribute("aria-selected", String(Number(button.dataset.head) === state.head));
    } else if (element.classList.contains("block-head")) {
      element.setAttribute("aria-expanded", String(state.openBlocks.has(Number(element.dataset.block))));
    }
  }
  setTabStop();
}

/** Makes one item of the tree reachable with Tab: the selected step, or the block that hides it. */
function setTabStop() {
  const items = treeItems();
  const block = String(state.steps.get(state.step).block);
  const focused = items.find((item) => item === document.activeElement && item.dataset.block);
  const stop = focused || items.find((item) => item.dataset.step === state.step) || items.find((item) => item.dataset.block === block) || items[0];
  for (const item of state.mapElement.querySelectorAll("[role=treeitem]")) item.tabIndex = item === stop ? 0 : -1;
}

/** The ids of the visible steps, in map order. */
function shownSteps() {
  return [...state.mapElement.querySelectorAll(".row")].filter((row) => !row.hidden).map((row) => row.dataset.step);
}

function mapKey(event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.target.closest(".block-head")) blockKey(event);
  if (!event.target.closest(".row")) return;
  const now = state.steps.get(state.step);
  const shown = shownSteps();
  const at = shown.indexOf(state.step);
  let to = null;
  if (["ArrowDown", "ArrowUp", "j", "k"].includes(event.key)) to = moveInTree(event.target.closest(".row"), event.key === "ArrowDown" || event.key === "j" ? 1 : -1);
  else if (event.key === "Home") to = shown[0];
  else if (event.key === "End") to = shown[shown.length - 1];
  else if (event.key === "ArrowRight" && now.id.endsWith(".3") && now.head === null) {
    if (state.openHeads.has(now.block)) to = `${now.block}.${state.head}.a_2`;
    else state.openHeads.add(now.block);
    showRows();
  } else if (event.key === "ArrowLeft" && now.block !== null) {
    if (now.head !== null) to = `${now.block}.3`;
    else if (now.id.endsWith(".3") && state.openHeads.has(now.block)) state.openHeads.delete(now.block);
    else focusItem(document.getElementById(`block-${now.block}`));
    showRows();
  } else if (/^[1-9]$/.test(event.key) && now.head !== null && Number(event.key) <= state.doc.model.heads) {
    chooseHead(Number(event.key) - 1);
    focusRow();
  } else if (event.key === "Enter") {
    state.detailReady.then(() => {
      const first = document.querySelector(".detail [role=grid]");
      if (first && state.step === now.id) first.focus();
    });
  } else return;
  event.preventDefault();
  if (to) select(to, { focus: true });
}

/** The visible items of the tree, in order. The heads of a block are chosen with 1 to 9. */
const treeItems = () => [...state.mapElement.querySelectorAll(".row, .block-head")].filter((item) => !item.hidden);

/** The step after or before an item; a block that is closed gets the focus itself, and null is returned. */
function moveInTree(item, by) {
  const items = treeItems();
  let at = items.indexOf(item) + by;
  while (at in items && items[at].classList.contains("block-head") && items[at].getAttribute("aria-expanded") === "true") at += by;
  if (!(at in items)) return null;
  if (items[at].dataset.step) return items[at].dataset.step;
  focusItem(items[at]);
  return null;
}

/** Moves the tree's one tab stop to an item. */
function focusItem(item) {
  item.focus();
  setTabStop();
}

/** Arrow keys on the head of a block: → opens it or enters it, ← closes it. */
function blockKey(event) {
  const item = event.target.closest(".block-head");
  const b = Number(item.dataset.block);
  const open = state.openBlocks.has(b);
  let to = null;
  if (event.key === "ArrowRight" && open) to = moveInTree(item, 1);
  else if ((event.key === "ArrowRight" && !open) || (event.key === "ArrowLeft" && open)) {
    toggleBlock(b);
    focusItem(item);
  } else if (event.key === "ArrowDown" || event.key === "ArrowUp") to = moveInTree(item, event.key === "ArrowDown" ? 1 : -1);
  else if (event.key !== "ArrowLeft") return;
  event.preventDefault();
  if (to) select(to, { focus: true });
}

function focusRow() {
  const row = document.getElementById(`row-${state.step}`);
  if (row) row.focus({ preventScroll: true });
}

/** Marks a step with ✓ if all its gradient checks passed, else ✗. */
function markProven(stepId, row = document.getElementById(`row-${stepId}`)) {
  if (!row || !row.firstChild) return;
  const step = state.steps.get(stepId);
  const ids = [step.backward, ...step.parameters.map(([, gradient]) => gradient)].filter((id) => state.proofs[id]);
  if (!ids.length) return;
  const good = ids.every((id) => state.proofs[id].passed && (!state.autograds[id] || state.autograds[id].passed));
  const mark = row.querySelector(".proven-mark");
  mark.textContent = good ? "✓" : "✗";
  mark.classList.toggle("bad", !good);
  row.title = good ? `${plural(ids.length, "gradient")} verified` : "a gradient check failed";
}
