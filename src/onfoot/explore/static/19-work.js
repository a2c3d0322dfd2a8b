// Work that takes a while: how far it is, and what stops it: the button, another view or text, or newer work of its kind.

const WORK_DELAY = 700; // ms: what is quicker needs no bar
const WORK_LOOK = 400; // ms between two looks at how far it is
const works = new Map(); // kind -> the work that runs, oldest first
let watcher = 0; // the timer of the next look

class StoppedError extends Error {}

/** The answer of ask(job, signal). Newer work of the same kind stops it; then it throws a StoppedError. */
async function working(kind, ask) {
  stopWork(kind);
  works.delete(kind);
  const one = { job: `${kind}-${Math.random().toString(36).slice(2, 14)}`, stop: new AbortController(), begun: Date.now() };
  works.set(kind, one);
  watcher = watcher || setTimeout(watchWork, WORK_DELAY);
  try {
    return await ask(one.job, one.stop.signal);
  } catch (error) {
    throw one.stop.signal.aborted ? new StoppedError("Stopped.") : error;
  } finally {
    if (works.get(kind) === one) works.delete(kind);
  }
}

/** Stops work of one kind, or all: the request is dropped, and the server ends what it computes for it. */
function stopWork(kind = null) {
  for (const [name, one] of works) if (kind === null || name === kind) one.stop.abort();
}

/** Shows how far the oldest work is, and looks again until none is left. */
async function watchWork() {
  const place = document.getElementById("work");
  const [one] = works.values();
  if (one && Date.now() - one.begun >= WORK_DELAY) {
    const found = await store.ask(`api/progress?job=${one.job}`).catch(() => ({}));
    const seconds = Math.round((Date.now() - one.begun) / 1000);
    const count = found.total ? `${found.done} of ${found.total} · ` : "";
    document.getElementById("work-words").textContent = `${found.what || "waiting for the server"} · ${count}${seconds} s`;
    const bar = document.getElementById("work-bar");
    if (found.total) Object.assign(bar, { max: found.total, value: found.done });
    else bar.removeAttribute("value");
    place.hidden = !works.size;
  }
  if (!works.size) place.hidden = true;
  watcher = works.size ? setTimeout(watchWork, WORK_LOOK) : 0;
}

/** What is shown in place of something that failed; of something that was stopped, with a button that starts it again. */
function failedNote(error, again) {
  if (!(error instanceof StoppedError)) return h("p", { class: "message" }, error.message);
  return h("p", { class: "message stopped" }, "Stopped. ", h("button", { type: "button", class: "small", onclick: again }, "Compute it again"));
}
