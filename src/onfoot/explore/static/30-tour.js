// The tour: a bar at the bottom of the page with one stop at a time, filled in with the numbers of this run.

const TOUR_KEY = "onfoot explore tour";
const TOUR_SPOTS = {
  // what a tour file may call the element that it talks about -> where it is on the page
  loss: () => "#loss",
  tokens: () => ".chips",
  map: () => ".map",
  row: () => `[data-step="${state.step}"]`,
  forward: () => ".detail > .pair .figure:not(.is-gradient)",
  backward: () => ".detail > .pair .figure.is-gradient",
  terms: () => ".detail > .pair .figure.is-gradient .explanation",
  parameters: () => ".detail .parameter",
  "parameter terms": () => ".detail .parameter .figure.is-gradient .explanation",
  play: () => ".motion-buttons",
  heads: () => ".head-cards",
  "take a step": () => "#next-step:not(:disabled)",
  tabs: () => ".tabs",
};

const tour = { stops: null, key: "", at: -1, wanted: "", panel: null, moving: 0, spot: null };

/** What the browser remembers of this page, in memory where storage is forbidden. */
const tourMemory = {
  values: new Map(),
  get(key) {
    try {
      return localStorage.getItem(key) || "";
    } catch {
      return this.values.get(key) || "";
    }
  },
  set(key, value) {
    this.values.set(key, value);
    try {
      localStorage.setItem(key, value);
    } catch {
      // forbidden: it is remembered until the page is closed
    }
  },
};

/** Runs f whenever a view was drawn, also for the first time. */
function whenDrawn(f) {
  const main = document.getElementById("main");
  const drawn = () => state.doc && main.getAttribute("aria-busy") === "false" && f();
  const watching = new MutationObserver(drawn);
  watching.observe(main, { attributes: true, attributeFilter: ["aria-busy"] });
  watching.observe(document.getElementById("panel"), { childList: true });
}

/** The stops of this run; requested again when another text is run. */
async function tourStops() {
  const { key } = state.doc;
  if (tour.key !== key) {
    tour.stops = (await store.work("tour")).stops;
    tour.key = key;
  }
  return tour.stops;
}

/** Opens the tour at a stop, counted from 0. */
async function openTour(at) {
  const turn = ++tour.moving;
  let stops;
  try {
    stops = await tourStops();
  } catch (error) {
    if (!(error instanceof StoppedError)) showMessage(error.message);
    return;
  }
  if (turn !== tour.moving || !stops.length) return;
  tour.at = Math.min(Math.max(at, 0), stops.length - 1);
  tourMemory.set(TOUR_KEY, String(tour.at + 1));
  hideOffer();
  drawTourPanel(stops);
  const stop = stops[tour.at];
  await goToStop(stop);
  if (turn !== tour.moving || tour.at < 0) return;
  showTourSpot(stop);
  tour.panel.dataset.ready = String(tour.at + 1);
  if (typeof writeHash === "function") writeHash();
}

async function goToStop(stop) {
  if (flow.at) clearFlow(); // what was played at the last stop
  const isMap = stop.view === "map" && state.view === "map" && state.mapElement && stop.step;
  if (stop.cell && stop.step) state.cell = linkedCell(arrayOfStep(stop.step), ...stop.cell);
  Object.assign(state, { view: stop.view, step: stop.step || state.step });
  tourToken(stop);
  if (typeof pushHash === "function") pushHash();
  if (isMap) select(stop.step);
  else await setView(stop.view, { push: false });
  if (stop.view === "map") await state.detailReady;
  if (stop.show === "play" && stop.step) climbFrom(stop.step);
  const largest = stop.show.startsWith("parameter") && document.querySelector(".parameter .figure.is-gradient");
  if (!largest) return;
  await largest.ready;
  const cell = await largestCell({ backward: largest.dataset.tensor });
  largest.dispatchEvent(new CustomEvent("choose", { detail: cell }));
  await largest.figure.pending; // the terms of that cell
}

const arrayOfStep = (id) => state.steps.get(id).backward || state.steps.get(id).forward;

/** Shows the prediction of the token that the stop talks about. */
function tourToken(stop) {
  if (stop.token !== null) return setToken(stop.token);
  if (!stop.cell || !stop.step) return undefined;
  const step = state.steps.get(stop.step);
  const { axes } = store.meta(step.backward || step.forward);
  const t = axes.length === 1 ? stop.cell[1] : stop.cell[0];
  return axes[0] === "token" ? setToken(t) : undefined;
}

/** Marks the element that the stop talks about. */
function showTourSpot(stop) {
  clearTourSpots();
  const selector = stop.show && TOUR_SPOTS[stop.show] && TOUR_SPOTS[stop.show]();
  const element = selector && document.querySelector(selector);
  if (!element) return;
  element.classList.add("tour-spot");
  tour.spot = element;
  keepSpotInView();
}

/** Scrolls to what the stop talks about, or its top if it is tall, again when the page grows (a check arrives), until the reader moves. */
function keepSpotInView() {
  if (!tour.spot || !tour.spot.isConnected) return;
  const { scrollMarginTop, scrollMarginBottom } = getComputedStyle(tour.spot); // the bar of tabs, and the tour
  const room = innerHeight - parseFloat(scrollMarginTop) - parseFloat(scrollMarginBottom);
  tour.spot.scrollIntoView({ block: tour.spot.offsetHeight > room ? "start" : "nearest" });
}

for (const name of ["wheel", "touchmove", "pointerdown", "keydown"]) document.addEventListener(name, () => (tour.spot = null), { capture: true, passive: true });

function clearTourSpots() {
  tour.spot = null;
  for (const element of document.querySelectorAll(".tour-spot")) element.classList.remove("tour-spot");
}

function drawTourPanel(stops) {
  const stop = stops[tour.at];
  const isNew = !tour.panel;
  if (isNew) {
    tour.panel = h("section", { class: "tour", id: "tour", "aria-label": "Tour" });
    document.body.append(tour.panel);
    document.body.classList.add("touring");
    new ResizeObserver(keepTourClear).observe(tour.panel);
    new ResizeObserver(keepSpotInView).observe(document.getElementById("main"));
  }
  const last = tour.at === stops.length - 1;
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.tour : "";
  const go = (name, text, to, more) => h("button", { type: "button", data: { tour: name }, onclick: () => (to === null ? closeTour() : openTour(to)), ...more }, text);
  const next = go("next", last ? "Finish" : "Next", last ? null : tour.at + 1, { class: "primary" });
  const tries = stop.show === "take a step" && !store.served ? [] : stop.try; // an exported page has one step
  tour.panel.dataset.stop = String(tour.at + 1);
  delete tour.panel.dataset.ready;
  tour.panel.replaceChildren(
    h(
      "div",
      { class: "tour-words", "aria-live": "polite" },
      h("p", { class: "tour-where" }, `Tour, ${tour.at + 1} of ${stops.length} `, stop.step && h("b", {}, stepPlace(state.steps.get(stop.step))), h("a", { href: `#tour=${tour.at + 1}`, class: "tour-link" }, "link to this stop")),
      h("h2", {}, stop.title),
      stop.text.map((parts) => h("p", { class: "tour-text" }, parts.map(tourPart))),
      tries.map((parts) => h("p", { class: "tour-try" }, h("b", {}, "Try it "), parts.map(tourPart))),
      stop.more.length > 0 && h("details", { class: "tour-more" }, h("summary", {}, "More"), stop.more.map((parts) => h("p", {}, parts.map(tourPart)))),
    ),
    h(
      "div",
      { class: "tour-moves" },
      go("back", "Back", tour.at - 1, { disabled: tour.at === 0 }),
      next,
      go("leave", "Leave", null, { class: "quiet", title: "Leave the tour (Esc)" }),
    ),
  );
  keepTourClear();
  const again = tour.panel.querySelector(`[data-tour="${focused || "none"}"]:not(:disabled)`);
  if (again) again.focus({ preventScroll: true });
  else if (isNew || focused) next.focus({ preventScroll: true });
}

/** Tells the style sheet the height of the bar, which no part of the page may be hidden under. */
function keepTourClear() {
  document.documentElement.style.setProperty("--tour", `${tour.panel ? tour.panel.offsetHeight : 0}px`);
}

/** The lowest line of the window that is seen: the map may extend below it, and the tour covers a part. */
const lowestSeen = () => innerHeight - (tour.panel ? tour.panel.offsetHeight : 0);

/** A part of a sentence: words, a formula, or a number of this run. */
function tourPart(part) {
  if (typeof part === "string") return part;
  if (part.math) return math(part.math);
  return h("b", { class: part.text.length > 30 ? "tour-number is-words" : "tour-number", data: { name: part.name, value: JSON.stringify(part.value) } }, part.text);
}

function closeTour() {
  tour.moving++;
  if (!tour.panel) return;
  const last = tour.stops && tour.at === tour.stops.length - 1;
  tourMemory.set(TOUR_KEY, last ? "done" : String(tour.at + 1));
  tour.at = -1;
  tour.panel.remove();
  tour.panel = null;
  document.body.classList.remove("touring");
  clearTourSpots();
  drawPrediction();
  nameTourButton();
  document.getElementById("take-tour").focus({ preventScroll: true });
  if (typeof writeHash === "function") writeHash();
}

/** The stop at which the tour was left, counted from 0. */
const leftAt = () => Math.max((Number(tourMemory.get(TOUR_KEY)) || 1) - 1, 0);

function nameTourButton() {
  const at = leftAt();
  const button = document.getElementById("take-tour");
  button.textContent = at > 0 ? `Tour (${at + 1})` : "Tour";
  button.setAttribute("aria-label", at > 0 ? `Resume tour (${at + 1})` : "Tour");
}

function hideOffer() {
  const offer = document.getElementById("tour-offer");
  if (offer) offer.remove();
  nameTourButton();
}

/** The offer that a first visitor sees above the tabs, and the button that stays at the top. */
function offerTour() {
  const theme = document.getElementById("theme");
  theme.before(h("button", { type: "button", id: "take-tour", class: "quiet", onclick: () => openTour(leftAt()) }, "Tour"));
  nameTourButton();
  if (tourMemory.get(TOUR_KEY)) return;
  const decline = () => {
    tourMemory.set(TOUR_KEY, "done");
    hideOffer();
  };
  document.getElementById("facts").after(
    h(
      "aside",
      { id: "tour-offer", class: "tour-offer", "aria-label": "What is this page?" },
      h("p", {}, h("b", {}, "What is this page? "), "A language model read the text above and made an error. Here you can follow that error back to every number that caused it."),
      h("button", { type: "button", class: "primary", onclick: () => openTour(0) }, "Take the tour, one minute"),
      h("button", { type: "button", class: "quiet", onclick: decline }, "Not now"),
    ),
  );
}

/** Opens the stop that the address names; "" closes the tour. */
function followTour(value) {
  const at = Number(value);
  if (!(at >= 1)) {
    if (!value && tour.panel) closeTour();
  } else if (!state.doc) tour.wanted = value;
  else if (at - 1 !== tour.at) openTour(at - 1);
}

function setUpTour() {
  const named = (address) => new URLSearchParams(address.slice(1)).get("tour") || "";
  tour.wanted = named(location.hash);
  offerTour();
  remember("tour", () => (tour.at < 0 ? "" : String(tour.at + 1)), followTour);
  addEventListener("hashchange", () => named(location.hash) && followTour(named(location.hash)));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (tour.panel) closeTour();
    else if (document.getElementById("tour-offer")) document.querySelector("#tour-offer .quiet").click();
  });
  whenDrawn(() => {
    const { wanted } = tour;
    tour.wanted = "";
    if (wanted) followTour(wanted);
    else if (tour.panel && tour.key !== state.doc.key) openTour(tour.at); // another text was run: its numbers
  });
}

setUpTour();
