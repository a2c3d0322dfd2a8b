// The signed colour scale: blue below 0, orange above, and the page's background at 0.

const SCALES = {
  light: { zero: [246, 243, 236], positive: [[242, 178, 107], [196, 98, 16], [110, 44, 0]], negative: [[140, 186, 232], [38, 110, 184], [6, 48, 102]] },
  dark: { zero: [32, 34, 40], positive: [[138, 78, 24], [226, 132, 44], [255, 205, 140]], negative: [[30, 78, 134], [70, 142, 222], [168, 212, 255]] },
};

const POWER = 0.65;

let table = null;

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function refreshColours() {
  const scale = SCALES[isDark() ? "dark" : "light"];
  table = { positive: ramp(scale.zero, scale.positive), negative: ramp(scale.zero, scale.negative) };
}

function ramp(zero, stops) {
  const all = [zero, ...stops];
  return Array.from({ length: 256 }, (_, i) => {
    const x = (i / 255) * (all.length - 1);
    const k = Math.min(Math.floor(x), all.length - 2);
    const mixed = all[k].map((low, channel) => Math.round(low + (x - k) * (all[k + 1][channel] - low)));
    return `rgb(${mixed.join(",")})`;
  });
}

/** The colour of x on a scale from −largest to +largest. The power makes small numbers visible. */
function colourOf(x, largest) {
  const share = largest > 0 ? Math.min(Math.abs(x) / largest, 1) : 0;
  return table[x < 0 ? "negative" : "positive"][Math.round(255 * share ** POWER)];
}

function cssVariable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** The colour scale with its two ends. */
function legend(largest, signed) {
  const steps = 33;
  const cells = Array.from({ length: steps }, (_, i) => {
    const x = signed ? (2 * i) / (steps - 1) - 1 : i / (steps - 1);
    return h("i", { style: { background: colourOf(Math.sign(x) * Math.abs(x) ** (1 / POWER), 1) } });
  });
  return h(
    "div",
    { class: "legend" },
    h("span", {}, signed ? brief(-largest, 3) : "0"),
    h("div", { class: "strip", "aria-hidden": "true" }, cells),
    h("span", {}, brief(largest, 3)),
  );
}
