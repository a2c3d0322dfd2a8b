// Loads numbers: from the local server, or from the page itself if it was exported.

const MAX_CELLS = 400000; // larger arrays are requested by row or column

const STEP_ROUNDING = 1e-14; // of a sum over a step's numbers, relative to the largest of them

class Matrix {
  constructor(values, shape) {
    this.values = values;
    this.shape = shape;
    this.cols = shape.length ? shape[shape.length - 1] : 1;
    this.rows = shape.length === 2 ? shape[0] : 1;
  }

  at(r, c) {
    return this.values[r * this.cols + c];
  }
}

class Store {
  constructor() {
    this.matrices = new Map();
  }

  meta(id) {
    return state.doc.tensors[id];
  }

  has(id) {
    return id in state.doc.tensors;
  }

  size(id) {
    return this.meta(id).shape.reduce((a, b) => a * b, 1);
  }

  /** The complete array. */
  matrix(id) {
    if (!this.matrices.has(id)) {
      const { shape } = this.meta(id); // of this run, though another may have replaced it when the numbers arrive
      this.matrices.set(id, this.load(id, {}).then((values) => new Matrix(values, shape)));
    }
    return this.matrices.get(id);
  }

  /** One row or one column; a vector is one row. */
  async line(id, axis, index) {
    if (this.size(id) > MAX_CELLS && this.served) return this.load(id, { [axis]: index });
    const matrix = await this.matrix(id);
    if (axis === "row") return matrix.values.subarray(index * matrix.cols, (index + 1) * matrix.cols);
    return Float64Array.from({ length: matrix.rows }, (_, r) => matrix.at(r, index));
  }

  async cell(id, r, c) {
    return (await this.line(id, "row", r))[c];
  }

  /** The largest absolute value of an array; 0 if it is too large to load. */
  async largest(id) {
    if (this.size(id) > MAX_CELLS) return 0;
    return (await this.matrix(id)).values.reduce((a, x) => (Number.isFinite(x) ? Math.max(a, Math.abs(x)) : a), 0);
  }

  /** The size at which an array is drawn in full: its largest number, or what rounding leaves of the step's error signal. */
  async scale(id) {
    const step = state.steps.get(stepOf(id));
    const signal = this.meta(id).gradient && step && step.backward ? await this.largest(step.backward) : 0;
    return Math.max(await this.largest(id), STEP_ROUNDING * signal);
  }

  /** Adds the arrays and formulas that come with a part of the page to the document. */
  register(part, doc = state.doc) {
    Object.assign(doc.tensors, part.tensors || {});
    Object.assign(doc.math, part.math || {});
    return part;
  }
}

/** An array decoded from base64. */
function decoded(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new Float64Array(bytes.buffer);
}

const GIVEN_TOKEN = new URLSearchParams(location.search).get("token");
const TOKEN = GIVEN_TOKEN ? { "X-Onfoot-Token": GIVEN_TOKEN } : {}; // every request has it; the address keeps it for a reload

class ServedStore extends Store {
  served = true;

  constructor({ opening, answer }) {
    super();
    this.opening = opening;
    this.first = answer;
  }

  /** The document of a text. The page comes with that of the text it opens with. */
  async study(body, signal) {
    const isFirst = this.first && body[this.opening.kind] === this.opening.value;
    const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    if (signal) signal.addEventListener("abort", () => stopWork("study"));
    const answer = isFirst ? this.first : await working("study", (job, stop) => this.ask(`api/study?job=${job}`, { ...request, signal: stop }));
    if (signal && signal.aborted) throw new Error("another text was requested");
    this.first = null;
    this.matrices.clear();
    this.key = answer.document.key;
    this.sent = answer.arrays;
    return answer.document;
  }

  async load(id, query) {
    if (id in this.sent && !("row" in query) && !("column" in query)) return decoded(this.sent[id]);
    const response = await this.fetch(this.path("tensor", { id, ...query }));
    return new Float64Array(await response.arrayBuffer());
  }

  async part(name, query = {}) {
    const { doc } = state;
    return this.register(await this.ask(this.path(name, query)), doc);
  }

  /** A part that may take a while: the page says how far it is, and newer work of its kind stops it. */
  async work(name, query = {}, kind = name) {
    const { doc } = state;
    return this.register(await working(kind, (job, signal) => this.ask(this.path(name, { ...query, job }), { signal })), doc);
  }

  async proofs(method, steps) {
    return (await this.ask(this.path(method, { step: steps.join(",") }))).proofs;
  }

  path(name, query) {
    const search = new URLSearchParams(query).toString();
    return `api/study/${this.key}/${name}${search ? "?" + search : ""}`;
  }

  async ask(path, options) {
    const answer = await (await this.fetch(path, options)).json();
    if (answer.refused) throw new Error(answer.refused);
    return answer;
  }

  async fetch(path, options) {
    let response;
    try {
      response = await fetch(path, { ...options, headers: { ...(options || {}).headers, ...TOKEN } });
    } catch {
      throw new Error("the server is not responding; is onfoot explore still running?");
    }
    if (!response.ok) {
      const answer = await response.json().catch(() => ({}));
      throw new Error(answer.message || `the server returned status ${response.status}`);
    }
    return response;
  }
}

class EmbeddedStore extends Store {
  served = false;

  constructor(data) {
    super();
    this.data = data;
    this.opening = data.opening;
  }

  async study() {
    return this.data.document;
  }

  async load(id) {
    return decoded(this.data.arrays[this.data.tensors[id]]);
  }

  async part(name, query = {}) {
    const key = [name, ...Object.values(query)].join(" ");
    if (!(key in this.data.parts)) {
      throw new Error("this exported page does not contain that; run onfoot explore to compute it");
    }
    return this.register(this.data.parts[key]);
  }

  work(name, query) {
    return this.part(name, query);
  }

  async proofs(method, steps) {
    return Object.assign({}, ...steps.map((id) => this.data.parts[`${method} ${id}`].proofs));
  }
}
