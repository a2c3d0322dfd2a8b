// The busy state: what is being computed is said, and what is still shown cannot be used.

const BUSY_DELAY = 150; // ms: what is quicker needs no words

function setBusy(what) {
  const main = document.getElementById("main");
  const note = document.getElementById("busy");
  main.setAttribute("aria-busy", String(Boolean(what)));
  main.inert = Boolean(what) && Boolean(state.doc);
  document.body.classList.toggle("is-busy", Boolean(what));
  clearTimeout(state.busyTimer);
  if (!what) note.textContent = "";
  else state.busyTimer = setTimeout(() => (note.textContent = what), BUSY_DELAY);
}
