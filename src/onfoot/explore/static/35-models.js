// What differs between the model families and between a served and an exported page, and how a parameter is named.

/** Whether an exported page was written without this array. */
function leftOut(id) {
  return !store.served && !(id in store.data.tensors);
}

function isLlama() {
  return state.doc.model.family === "llama";
}

function normName() {
  return isLlama() ? "RMS" : "LN";
}

/** The name of a parameter or layer without the prefix that all have. */
function shortName(name) {
  return name.replace(/^(transformer|model)\./, "");
}
