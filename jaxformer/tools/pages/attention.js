"use strict";
// The page of attention maps: its state, the weights, the grid of heads and the strips of a step.

const at = (id) => document.getElementById(id);
const DATA = JSON.parse(at("data").textContent), MAPS = DATA.maps, MEAN = -1, LEVELS = 65535;
const SCALES = { // ticks: where on the legend, and the weight that it stands for
  root: { name: "√ weight", shade: Math.sqrt,
    ticks: [[0, "0"], [.1, ".01"], [.316, ".1"], [.5, ".25"], [.707, ".5"], [1, "1"]] },
  linear: { name: "weight", shade: (w) => w, ticks: [[0, "0"], [.25, ".25"], [.5, ".5"], [.75, ".75"], [1, "1"]] },
  row: { name: "weight ÷ row’s largest", shade: (w, top) => w / (top || 1), ticks: [[0, "0"], [1, "row’s largest"]] },
};
const kinds = Object.keys(MAPS), walked = DATA.tokens.target ? "target" : "source", steps = DATA.tokens[walked].length;
const state = { kind: kinds.at(-1), step: 0, pinned: null, scale: "root", hover: null, stage: null, pick: {} };
for (const kind of kinds) {
  const bytes = Uint8Array.from(atob(MAPS[kind].weights), (c) => c.charCodeAt(0));
  MAPS[kind].weights = new Uint16Array(bytes.buffer);
  state.pick[kind] = { layer: MAPS[kind].shape[0] - 1, head: MEAN };
}

// Tokens, and the groups of those that share characters

// Of each axis: { first, last, text } of each label; of each token its text, that of its group with its place in it; and
// this with its own bytes.
const SPANS = {}, WORDS = {}, BYTES = {};
for (const [axis, own] of Object.entries(DATA.tokens)) {
  const groups = DATA.groups[axis].map(([first, last, text]) => ({ first, last, text }));
  const inside = (i) => groups.find(({ first, last }) => first <= i && i < last);
  WORDS[axis] = own.map((word, i) => {
    const group = inside(i);
    return group ? `${group.text} (${i - group.first + 1}/${group.last - group.first})` : word;
  });
  BYTES[axis] = own.map((word, i) => (inside(i) ? `${WORDS[axis][i]} ${word}` : word));
  const single = own.map((text, i) => ({ first: i, last: i + 1, text })).filter(({ first }) => !inside(first));
  SPANS[axis] = [...groups, ...single].sort((a, b) => a.first - b.first);
}
const keysOf = (kind) => WORDS[MAPS[kind].key], queriesOf = (kind) => WORDS[MAPS[kind].query];
const pairText = (kind, query, key) => `${BYTES[MAPS[kind].query][query]} → ${BYTES[MAPS[kind].key][key]}`;

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
function box(tag, className, ...children) {
  const element = make(tag, "", { className });
  element.append(...children);
  return element;
}
const layerName = (layer) => (DATA.layers.length ? DATA.layers[layer] : layer);
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
  for (const radio of document.getElementsByName("kind")) radio.checked = radio.value === state.kind;
}

// Step by step

function strip(kind) { // the tokens that the chosen map of a kind reads from at this step, each shaded by its weight
  const query = queryOf(kind), row = rowOf(kind, query), shaded = shades(row, 1, row.length);
  const list = make("div", "", { className: "tokens" }), axis = MAPS[kind].key, same = MAPS[kind].query === axis;
  const kept = state.pinned === null ? "" : " (kept)";
  const from = MAPS[kind].query === walked ? "" : `, from “${queriesOf(kind)[query]}”${kept}`;
  const chip = (text, key) => {
    const title = `${pairText(kind, query, key)}: ${exact(row[key])}`;
    const made = make("span", text, { title, onclick: () => go(axis, key) });
    Object.assign(made.style, { background: css(color(shaded[key])), color: inkOn(color(shaded[key])) });
    made.classList.toggle("here", same && key === query);
    made.classList.toggle("unseen", same && key > query && row[key] === 0);
    return made;
  };
  for (const { first, last, text } of SPANS[axis]) {
    if (last === first + 1) list.append(chip(text, first));
    else list.append(box("span", "group", text, ...Array.from({ length: last - first }, (_, i) => chip(i + 1, first + i))));
  }
  const name = make("button", MAPS[kind].title, { title: "Show this map", onclick: () => change({ kind }) });
  return box("div", "strip", name, make("span", `  ${nameOf(state.pick[kind])}${from}`, { className: "soft" }), list);
}

function showStep() {
  const { step, kind } = state, words = WORDS[walked];
  const next = walked === "target" ? DATA.tokens[walked][step + 1] : undefined, following = words[step + 1];
  at("slider").value = step;
  at("slider").setAttribute("aria-valuetext", `${step + 1} of ${steps}: ${words[step]}`);
  at("place").textContent = `${step + 1} of ${steps}: “${words[step]}”`;
  at("back").disabled = step === 0;
  at("on").disabled = step === steps - 1;
  at("strips").replaceChildren(...["cross", "decoder", "encoder"].filter((each) => kinds.includes(each)).map(strip));
  const leading = [...(DATA.candidates[step] ?? [])].sort((a, b) => b[1] - a[1]);
  at("leading").hidden = !DATA.candidates.length;
  at("asks").textContent = walked === "source" ? `Leading candidates at “${words[step]}”`
    : `Leading candidates after “${words[step]}”${next === undefined ? "" : `; what follows is “${following}”`}`;
  at("candidates").replaceChildren(...leading.map(([word, share]) => {
    const item = make("li", "", { className: word === next ? "next" : "" });
    const bar = make("i", "", { style: `width: ${100 * share}%` });
    item.append(make("span", word, { title: word }), bar, make("b", percent(share)));
    return item;
  }));
  const query = queryOf(kind), row = rowOf(kind, query);
  const most = ranked(row).slice(0, 4).filter((key) => row[key] > 0).map((key) => `${keysOf(kind)[key]} ${exact(row[key])}`);
  at("row").textContent = `${queriesOf(kind)[query]} → ${most.join(",  ") || "nothing"}`;
}
