"use strict";
// What a reader can do on the page: by pointer, keyboard and touch. Draws it for the first time.

const RENDER = { // what is drawn anew when a part of the state changes
  kind: [showGrid, showMap, showStep], scale: [showGrid, showMap, showStep], pick: [showMap, showStep, showMasks],
  step: [showStep, draw, showStage, showMasks, showBeams, showLens], pinned: [showStep, draw, showMasks], hover: [draw],
  stage: [showStage], theme: [showGrid, showMap, showStep, showMasks, showLens],
};
function change(values) {
  Object.assign(state, values);
  if ("kind" in values) state.hover = null;
  for (const render of new Set(Object.keys(values).flatMap((name) => RENDER[name]))) render();
}
const within = (value, low, high) => Math.min(Math.max(value, low), high);
function choose(layer, head) {
  change({ pick: { ...state.pick, [state.kind]: { layer, head } } });
}
function go(axis, place) { // to a step, or, for the source beside a target, keeps the encoder at one token or lets it go
  if (axis === walked) change({ step: within(place, 0, steps - 1) });
  else change({ pinned: state.pinned === place ? null : place });
}
const walk = (by) => go(walked, state.step + by);
function turn(layersOn, headsOn) {
  const { layer, head } = state.pick[state.kind], [layers, heads] = MAPS[state.kind].shape;
  choose(within(layer + layersOn, 0, layers - 1), within(head + headsOn, MEAN, heads - 1));
  at("grid").querySelector("[aria-pressed=true]").focus();
}

// Keyboard: arrows move from head to head on a head, and else from step to step

const TURNS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
const WALKS = { ArrowLeft: -1, ArrowRight: 1, ",": -1, ".": 1, Home: -Infinity, End: Infinity };
document.addEventListener("keydown", (event) => {
  const { key, target } = event, typed = target.matches("input, select") && key.length > 1;
  if (typed || event.ctrlKey || event.metaKey || event.altKey) return;
  const scrolls = target.matches(".scroll") && target.scrollWidth > target.clientWidth && key.startsWith("Arrow");
  if (at("grid").contains(target) && TURNS[key]) turn(...TURNS[key]);
  else if (WALKS[key] && !scrolls) walk(WALKS[key]);
  else return;
  event.preventDefault();
});

// Touch: a swipe to the left goes on, one to the right goes back, but not in a box that scrolls that way itself

let touched = null;
document.addEventListener("touchstart", (event) => {
  const { clientX, clientY } = event.touches[0], target = event.target;
  const own = target.closest?.("input, select") || [...document.querySelectorAll(".scroll")]
    .some((each) => each.contains(target) && each.scrollWidth > each.clientWidth);
  touched = own || event.touches.length > 1 ? null : { clientX, clientY };
}, { passive: true });
document.addEventListener("touchend", (event) => {
  if (touched === null) return;
  const { clientX, clientY } = event.changedTouches[0], across = clientX - touched.clientX, down = clientY - touched.clientY;
  touched = null;
  if (Math.abs(across) > 48 && Math.abs(across) > 2 * Math.abs(down)) walk(across < 0 ? 1 : -1);
}, { passive: true });

// The large map

function under(event) { // the cell of the large map under the pointer, or null
  const bounds = at("large").getBoundingClientRect(), [, , rows, columns] = MAPS[state.kind].shape;
  const query = Math.floor((event.clientY - bounds.top - frame.top) / frame.cell);
  const key = Math.floor((event.clientX - bounds.left - frame.left) / frame.cell);
  return query >= 0 && query < rows && key >= 0 && key < columns ? { query, key } : null;
}
function point(event) {
  const cell = event.type === "pointerleave" ? null : under(event), tip = at("tip");
  change({ hover: cell });
  tip.hidden = cell === null;
  if (cell === null) return;
  const weight = rowOf(state.kind, cell.query)[cell.key];
  tip.textContent = `${pairText(state.kind, cell.query, cell.key)}: ${exact(weight)}`;
  const below = event.clientY + 18, above = event.clientY - 12 - tip.offsetHeight;
  tip.style.left = `${Math.max(Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8), 8)}px`;
  tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : above}px`;
}
at("large").addEventListener("pointermove", point);
at("large").addEventListener("pointerleave", point);
at("large").addEventListener("click", (event) => {
  const cell = under(event);
  if (cell === null) return;
  go(MAPS[state.kind].query, cell.query);
  if (event.pointerType === "touch") point(event); // a finger does not hover: the weight stays until the next touch
});
document.addEventListener("pointerdown", () => { at("tip").hidden = true; });

// The rest

at("slider").addEventListener("input", () => go(walked, Number(at("slider").value)));
at("back").addEventListener("click", () => walk(-1));
at("on").addEventListener("click", () => walk(1));
at("scale").addEventListener("change", () => change({ scale: at("scale").value }));
window.addEventListener("resize", layOut);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); change({ theme: null }); });

for (const kind of kinds) {
  const radio = make("input", "", { type: "radio", name: "kind", value: kind, onchange: () => change({ kind }) });
  at("kinds").append(box("label", "", radio, MAPS[kind].title));
}
at("kinds").hidden = kinds.length === 1;
at("scale").append(...Object.entries(SCALES).map(([value, { name }]) => make("option", name, { value })));
at("slider").max = steps - 1;
at("title").textContent = document.title = DATA.title;
const sizes = kinds.map((kind) => `${MAPS[kind].title}: ${MAPS[kind].shape[0]} layers of ${MAPS[kind].shape[1]} heads`);
const lengths = Object.entries(DATA.tokens).map(([axis, words]) => `${words.length} ${axis} tokens`);
at("facts").textContent = [...sizes, ...lengths].join("  ·  ");
readTheme();
showParts();
change({ kind: state.kind, step: 0 });
at("panels").hidden = [...at("panels").children].every((panel) => panel.hidden);
