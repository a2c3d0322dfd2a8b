// What differs between the model families, and how a parameter is named.

const isLlama = () => state.doc.model.family === "llama";
const normName = () => (isLlama() ? "RMS" : "LN");

/** The name of a parameter or layer without the prefix that all have. */
function shortName(name) {
  return name.replace(/^(transformer|model)\./, "");
}
