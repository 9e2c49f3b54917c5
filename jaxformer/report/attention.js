"use strict";
// The page of attention maps: what it shows, and what a reader can do. Draws by heatmap.js.

const at = (id) => document.getElementById(id);
const DATA = JSON.parse(at("data").textContent), MAPS = DATA.maps, MEAN = -1, LEVELS = 65535;
const SCALES = { // ticks: where on the legend, and the weight that it stands for
  root: { name: "√ weight", shade: Math.sqrt,
    ticks: [[0, "0"], [.1, ".01"], [.316, ".1"], [.5, ".25"], [.707, ".5"], [1, "1"]] },
  linear: { name: "weight", shade: (w) => w, ticks: [[0, "0"], [.25, ".25"], [.5, ".5"], [.75, ".75"], [1, "1"]] },
  row: { name: "weight ÷ row’s largest", shade: (w, top) => w / (top || 1), ticks: [[0, "0"], [1, "row’s largest"]] },
};
const kinds = Object.keys(MAPS), walked = DATA.tokens.target ? "target" : "source", steps = DATA.tokens[walked].length;
const state = { kind: kinds.at(-1), step: 0, pinned: null, scale: "root", hover: null, pick: {} };
for (const kind of kinds) {
  const bytes = Uint8Array.from(atob(MAPS[kind].weights), (c) => c.charCodeAt(0));
  MAPS[kind].weights = new Uint16Array(bytes.buffer);
  state.pick[kind] = { layer: MAPS[kind].shape[0] - 1, head: MEAN };
}

// Weights

function matrix(kind, layer, head) {
  const { weights, shape: [, heads, rows, columns] } = MAPS[kind], size = rows * columns;
  const chosen = head === MEAN ? [...Array(heads).keys()] : [head], out = new Float32Array(size);
  for (const h of chosen) {
    const from = (layer * heads + h) * size;
    for (let i = 0; i < size; i++) out[i] += weights[from + i] / (LEVELS * chosen.length);
  }
  return out;
}
const seen = new Map();
function picked(kind) { // the chosen map of a kind, computed once for each choice
  const { layer, head } = state.pick[kind], choice = `${layer} ${head}`;
  if (seen.get(kind)?.choice !== choice) seen.set(kind, { choice, values: matrix(kind, layer, head) });
  return seen.get(kind).values;
}
function rowOf(kind, query) {
  const columns = MAPS[kind].shape[3];
  return picked(kind).subarray(query * columns, (query + 1) * columns);
}
const ranked = (row) => [...row.keys()].sort((a, b) => row[b] - row[a]);
function queryOf(kind) { // the step, or, for an encoder beside a decoder, the source token that the step reads most
  if (MAPS[kind].query === walked) return state.step;
  return state.pinned ?? (MAPS.cross ? ranked(rowOf("cross", state.step))[0] : 0);
}
const keysOf = (kind) => DATA.tokens[MAPS[kind].key], queriesOf = (kind) => DATA.tokens[MAPS[kind].query];
const percent = (w) => `${(100 * w).toFixed(w < .0995 ? 1 : 0)} %`;
const exact = (w) => (w === 0 ? "0" : w < .0005 ? "< 0.001" : w.toFixed(3));

function habits(kind) { // how far the mean query of the chosen map spreads, and where it goes
  const [, , rows, columns] = MAPS[kind].shape, values = picked(kind), self = MAPS[kind].query === MAPS[kind].key;
  const places = self ? { "the first": () => 0, "itself": (q) => q, "the one before": (q) => q - 1 }
    : { "the first": () => 0, "the last": () => columns - 1 };
  const shares = Object.entries(places).map(([name, key]) => {
    let sum = 0;
    for (let q = 0; q < rows; q++) if (key(q) >= 0) sum += values[q * columns + key(q)];
    return `${percent(sum / rows)} to ${name}`;
  });
  const entropy = (row) => row.reduce((sum, w) => sum - (w && w * Math.log(w)), 0);
  const spreads = Array.from({ length: rows }, (_, q) => Math.exp(entropy(rowOf(kind, q))));
  const mean = spreads.reduce((a, b) => a + b) / rows;
  return `On average a token spreads over ${mean.toFixed(1)} tokens: ${shares.join(", ")}.`;
}

// What is on the page

function make(tag, text, properties = {}) {
  return Object.assign(document.createElement(tag), { textContent: text, ...properties });
}
const layerName = layer => DATA.layers.length ? DATA.layers[layer] : layer;
const nameOf = ({ layer, head }) => `layer ${layerName(layer)}, ${head === MEAN ? "mean of heads" : `head ${head}`}`;

function showGrid() {
  const [layers, heads, rows, columns] = MAPS[state.kind].shape, cells = [make("span", "")];
  const columnHeads = [MEAN, ...Array(heads).keys()];
  at("grid").style.gridTemplateColumns = `auto repeat(${heads + 1}, minmax(1.6rem, 4.6rem))`;
  for (const head of columnHeads) cells.push(make("span", head === MEAN ? "mean" : head));
  for (let layer = 0; layer < layers; layer++) {
    cells.push(make("span", layerName(layer)));
    for (const head of columnHeads) {
      const name = nameOf({ layer, head }), onclick = () => choose(layer, head);
      const button = make("button", "", { className: "head", title: name, onclick });
      button.setAttribute("aria-label", name);
      button.dataset.place = `${layer} ${head}`;
      const small = make("canvas", "", { className: Math.max(rows, columns) <= 24 ? "crisp" : "" });
      button.append(paint(small, matrix(state.kind, layer, head), rows, columns, 64));
      cells.push(button);
    }
  }
  at("grid").replaceChildren(...cells);
  const { query, key } = MAPS[state.kind], { ticks } = SCALES[state.scale];
  at("says").textContent = `Layers down, heads across. In a map, each ${query} token (row) reads ${key} tokens (columns).`;
  const marks = ticks.map(([place, text]) => make("span", text, { style: `left: ${100 * place}%` }));
  at("legend").replaceChildren(make("i", ""), ...marks);
  at("legend").setAttribute("aria-label", `Colors of the weights, from ${ticks[0][1]} to ${ticks.at(-1)[1]}`);
}

// Step by step

function strip(kind) { // the tokens that the chosen map of a kind reads from at this step, each shaded by its weight
  const query = queryOf(kind), row = rowOf(kind, query), shaded = shades(row, 1, row.length);
  const box = make("div", "", { className: "strip" }), list = make("div", "", { className: "tokens" });
  const same = MAPS[kind].query === MAPS[kind].key;
  const kept = state.pinned === null ? "" : " (kept)";
  const from = MAPS[kind].query === walked ? "" : `, from “${queriesOf(kind)[query]}”${kept}`;
  box.append(make("button", MAPS[kind].title, { title: "Show this map", onclick: () => change({ kind }) }));
  box.append(make("span", `  ${nameOf(state.pick[kind])}${from}`, { className: "soft" }), list);
  keysOf(kind).forEach((word, key) => {
    const title = `${queriesOf(kind)[query]} → ${word}: ${exact(row[key])}`;
    const chip = make("span", word, { title, onclick: () => go(MAPS[kind].key, key) });
    Object.assign(chip.style, { background: css(color(shaded[key])), color: inkOn(color(shaded[key])) });
    chip.classList.toggle("here", same && key === query);
    chip.classList.toggle("unseen", same && key > query && row[key] === 0);
    list.append(chip);
  });
  return box;
}

function showStep() {
  const { step, kind } = state, words = DATA.tokens[walked], next = walked === "target" ? words[step + 1] : undefined;
  at("slider").value = step;
  at("slider").setAttribute("aria-valuetext", `${step + 1} of ${steps}: ${words[step]}`);
  at("place").textContent = `${step + 1} of ${steps}`;
  at("strips").replaceChildren(...["cross", "decoder", "encoder"].filter((each) => kinds.includes(each)).map(strip));
  const leading = [...(DATA.candidates[step] ?? [])].sort((a, b) => b[1] - a[1]);
  at("leading").hidden = !DATA.candidates.length;
  at("asks").textContent = walked === "source" ? `Leading candidates at “${words[step]}”`
    : `Leading candidates after “${words[step]}”${next === undefined ? "" : `; what follows is “${next}”`}`;
  at("candidates").replaceChildren(...leading.map(([word, share]) => {
    const item = make("li", "", { className: word === next ? "next" : "" });
    const bar = make("i", "", { style: `width: ${100 * share}%` });
    item.append(make("span", word, { title: word }), bar, make("b", percent(share)));
    return item;
  }));
  const query = queryOf(kind), row = rowOf(kind, query);
  const most = ranked(row).slice(0, 4).filter((key) => row[key] > 0).map((key) => `${keysOf(kind)[key]} ${exact(row[key])}`);
  at("row").textContent = `${queriesOf(kind)[query]} → ${most.join(",  ")}`;
}

// What a reader does

const RENDER = { // what is drawn anew when a part of the state changes
  kind: [showGrid, showMap, showStep], scale: [showGrid, showMap, showStep], pick: [showMap, showStep],
  step: [showStep, draw], pinned: [showStep, draw], hover: [draw],
};
function change(values) {
  Object.assign(state, values);
  if ("kind" in values) state.hover = null;
  for (const radio of document.getElementsByName("kind")) radio.checked = radio.value === state.kind;
  for (const render of new Set(Object.keys(values).flatMap((name) => RENDER[name]))) render();
}
function choose(layer, head) {
  change({ pick: { ...state.pick, [state.kind]: { layer, head } } });
}
function go(axis, place) { // to a step, or, for the source beside a target, keeps the encoder at one token or lets it go
  if (axis === walked) change({ step: Math.min(Math.max(place, 0), steps - 1) });
  else change({ pinned: state.pinned === place ? null : place });
}
function turn(layersOn, headsOn) {
  const { layer, head } = state.pick[state.kind], [layers, heads] = MAPS[state.kind].shape;
  const within = (value, low, high) => Math.min(Math.max(value, low), high);
  choose(within(layer + layersOn, 0, layers - 1), within(head + headsOn, MEAN, heads - 1));
  if (at("grid").contains(document.activeElement)) at("grid").querySelector("[aria-pressed=true]").focus();
}
const KEYS = {
  ArrowLeft: () => turn(0, -1), ArrowRight: () => turn(0, 1), ArrowUp: () => turn(-1, 0), ArrowDown: () => turn(1, 0),
  ",": () => go(walked, state.step - 1), ".": () => go(walked, state.step + 1),
};
document.addEventListener("keydown", (event) => {
  const typed = event.target.matches("input, select") && event.key.startsWith("Arrow");
  if (typed || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

function under(event) { // the cell of the large map under the pointer, or null
  const box = at("large").getBoundingClientRect(), [, , rows, columns] = MAPS[state.kind].shape;
  const query = Math.floor((event.clientY - box.top - frame.top) / frame.cell);
  const key = Math.floor((event.clientX - box.left - frame.left) / frame.cell);
  return query >= 0 && query < rows && key >= 0 && key < columns ? { query, key } : null;
}
function point(event) {
  const cell = event.type === "pointerleave" ? null : under(event), tip = at("tip");
  change({ hover: cell });
  tip.hidden = cell === null;
  if (cell === null) return;
  const weight = rowOf(state.kind, cell.query)[cell.key];
  tip.textContent = `${queriesOf(state.kind)[cell.query]} → ${keysOf(state.kind)[cell.key]}: ${exact(weight)}`;
  const below = event.clientY + 18, above = event.clientY - 12 - tip.offsetHeight;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : above}px`;
}
at("large").addEventListener("pointermove", point);
at("large").addEventListener("pointerleave", point);
at("large").addEventListener("click", (event) => under(event) && go(MAPS[state.kind].query, under(event).query));
at("slider").addEventListener("input", () => go(walked, Number(at("slider").value)));
at("back").addEventListener("click", () => go(walked, state.step - 1));
at("on").addEventListener("click", () => go(walked, state.step + 1));
at("scale").addEventListener("change", () => change({ scale: at("scale").value }));
window.addEventListener("resize", layOut);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); change({ kind: state.kind }); });

for (const kind of kinds) {
  const label = make("label", "");
  const radio = make("input", "", { type: "radio", name: "kind", value: kind, onchange: () => change({ kind }) });
  label.append(radio, MAPS[kind].title);
  at("kinds").append(label);
}
at("kinds").hidden = kinds.length === 1;
at("scale").append(...Object.entries(SCALES).map(([value, { name }]) => make("option", name, { value })));
at("slider").max = steps - 1;
at("title").textContent = document.title = DATA.title;
const sizes = kinds.map((kind) => `${MAPS[kind].title}: ${MAPS[kind].shape[0]} layers of ${MAPS[kind].shape[1]} heads`);
const lengths = Object.entries(DATA.tokens).map(([axis, words]) => `${words.length} ${axis} tokens`);
at("facts").textContent = [...sizes, ...lengths].join("  ·  ");
readTheme();
change({ kind: state.kind });
