// What the address says: every part of the page that a link should reopen registers itself here.

const REMEMBERED = new Map(); // name in the address -> { get, set }

/** Makes a part of the state appear in the address; `get` returns a string, or "" for its first value. */
function remember(name, get, set) {
  REMEMBERED.set(name, { get, set });
}
