// The address says what is seen: a link reopens it, Back returns to it.
// `pushHash` is for going somewhere (a new entry of the history), `writeHash` for small moves (the same entry, rewritten).

const REMEMBERED = new Map(); // name in the address -> { get, set, early }
const WRITE_DELAY = 200; // ms: a held arrow key changes the state many times
const address = { read: null, pending: null, timer: 0, scrollTimer: 0, following: 0, turn: 0 };

/**
 * Makes a part of the state appear in the address; `get` returns a string, or "" for its first value.
 * `set` receives it when a link is opened and on Back, after the view is drawn, or before if `early`.
 */
function remember(name, get, set, { early = false } = {}) {
  REMEMBERED.set(name, { get, set, early });
  if (address.read && address.read.has(name)) recall([name], address.read); // registered after the page was opened
}

const readAddress = () => new URLSearchParams(location.hash.slice(1));
const isOurs = (query) => [...query.keys()].some((name) => REMEMBERED.has(name)); // not that of a link such as #main

function hashNow() {
  const query = new URLSearchParams();
  for (const [name, { get }] of REMEMBERED) if (get()) query.set(name, get());
  return `#${query}`;
}

/** Rewrites the entry of the history, after a delay. */
function writeHash() {
  address.pending = hashNow();
  clearTimeout(address.timer);
  address.timer = setTimeout(flushHash, WRITE_DELAY);
}

function flushHash() {
  clearTimeout(address.timer);
  if (address.pending !== null) history.replaceState(history.state, "", address.pending);
  address.pending = null;
}

/** Adds an entry to the history, if something changed. Call it before the new view is drawn, so that the old entry keeps its scroll position. */
function pushHash() {
  if (address.following) return;
  flushHash();
  if (hashNow() === location.hash) return;
  history.replaceState(scrolled(), "", location.hash || "#");
  history.pushState(null, "", hashNow());
}

const scrolled = () => ({ y: Math.round(scrollY), map: state.mapElement ? Math.round(state.mapElement.scrollTop) : 0 });

/** Keeps the scroll position in the entry of the history, for Forward and for a reload. */
function keepScroll() {
  clearTimeout(address.scrollTimer);
  address.scrollTimer = setTimeout(() => {
    if (!address.following && state.doc) history.replaceState(scrolled(), "", location.hash || "#");
  }, WRITE_DELAY);
}

/** Sets registered parts from an address, those that differ from it. */
async function recall(names, query) {
  const sets = names.map((name) => {
    const { get, set } = REMEMBERED.get(name);
    const value = query.get(name) || "";
    return get() === value ? null : set(value);
  });
  await Promise.all(sets);
}

const namesOf = (early) => [...REMEMBERED].filter(([, one]) => one.early === early).map(([name]) => name);
const recallEarly = (query) => recall(namesOf(true), query);

/** Sets what is drawn into a view, then scrolls to where it was left, or to the cell that a link names. */
async function recallLate(query) {
  address.following++;
  try {
    await recall(namesOf(false), query);
    const left = history.state;
    await figuresReady();
    const figure = await showAt();
    await frame(); // the figures get their height in the next frame
    await frame();
    if (left && "y" in left) {
      if (state.mapElement) state.mapElement.scrollTop = left.map;
      scrollTo(0, left.y);
    } else if (figure) figure.scrollIntoView({ block: "center" });
  } finally {
    address.following--;
  }
}

const frame = () => new Promise(requestAnimationFrame);
const figuresReady = () => Promise.all([...document.querySelectorAll("#main .figure")].map((element) => element.ready));

/** Shows what an address says that was gone back to, typed or linked. */
async function followAddress() {
  const query = readAddress();
  if (!state.doc || !isOurs(query)) return;
  clearTimeout(address.timer);
  clearTimeout(address.scrollTimer);
  address.pending = null;
  const turn = ++address.turn;
  const early = () => JSON.stringify(namesOf(true).map((name) => REMEMBERED.get(name).get()));
  const [before, view, asked] = [early(), state.view, askedBy(query)];
  address.following++;
  try {
    if (asked.kind !== state.asked.kind || asked.value !== state.asked.value) await run({ [asked.kind]: asked.value }, { push: false, query });
    else {
      cancelRun();
      await recallEarly(query);
      await settle();
      if (turn !== address.turn) return;
      if (early() !== before) {
        if (view === "map" && state.view === "map") select(state.step, { at: state.at });
        else await setView(state.view, { push: false, at: state.at });
      }
    }
    if (turn === address.turn) await recallLate(query);
  } finally {
    address.following--;
  }
}
