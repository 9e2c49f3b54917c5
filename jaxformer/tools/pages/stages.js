"use strict";
// The order of computation as a diagram, and the formula and the shapes of the chosen stage.

const TITLES = { embed: "Embedding", attention: "Self-attention", cross: "Cross-attention", ffn: "Feed-forward", head: "Head",
  final_norm: "Final norm" };
const PARTS = { encoder: "Encoder", decoder: "Decoder", output: "Output" };
const STAGES = DATA.stages, lastName = (stage) => stage.name.split(".").at(-1);

function titleOf(stage) {
  const what = lastName(stage);
  if (what === "attention" && stage.part === "decoder") return "Masked self-attention";
  return TITLES[what] ?? (what.endsWith("norm") ? "Norm" : what);
}
// Target tokens are read one by one: at a step, T is their number so far.
const growing = (name) => name === "T" && walked === "target";
const symbols = (axes) => `[${axes.map(([name]) => name).join(", ")}]`;
const numbers = (axes) => `[${axes.map(([name, size]) => (growing(name) ? state.step + 1 : size)).join(", ")}]`;
const shapesOf = (arrays, write) => arrays.map(write).join(" ");

function stageButton(stage, index) {
  const onclick = () => {
    const maps = MAPS[stage.kind] ? { kind: stage.kind } : {}; // those that it makes are shown too
    change({ stage: state.stage === index ? null : index, ...maps });
    at("stage").scrollIntoView({ block: "nearest" });
  };
  const className = lastName(stage).endsWith("norm") ? "stage minor" : "stage";
  const button = make("button", titleOf(stage), { className, title: stage.name, onclick });
  button.append(make("span", shapesOf(stage.makes, symbols)));
  button.setAttribute("aria-pressed", "false");
  button.setAttribute("aria-controls", "stage");
  button.dataset.stage = index;
  return button;
}
function layersText(layers) {
  return layers.length > 1 ? `× ${layers.length}, layers ${layers[0]} to ${layers.at(-1)}` : `layer ${layers[0]}`;
}
function partBox(part) { // the stages of a part; those of the same layers in a frame
  const flow = box("div", "flow");
  let frame = null, layers = "";
  STAGES.forEach((stage, index) => {
    if (stage.part !== part) return;
    if (!stage.layers.length || stage.layers.join() !== layers) {
      layers = stage.layers.join();
      frame = stage.layers.length ? box("div", "flow") : flow;
      if (frame !== flow) flow.append(box("div", "layers", make("p", layersText(stage.layers), { className: "soft" }), frame));
    }
    frame.append(stageButton(stage, index));
  });
  const when = make("p", "", { className: "soft" });
  when.dataset.when = part;
  const made = box("div", `part ${part}`, make("h3", PARTS[part]), when, flow);
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", PARTS[part]);
  return made;
}
function showParts() {
  at("order").hidden = !STAGES.length;
  at("parts").replaceChildren(...Object.keys(PARTS).filter((part) => STAGES.some((stage) => stage.part === part)).map(partBox));
}

const fed = (text, next) => make("span", text, { className: next ? "fed next" : "fed" });
function showWhen() { // what each part reads or makes at this step
  const { step } = state, words = WORDS[walked], both = kinds.includes("cross");
  const texts = {
    encoder: [`Once, all ${DATA.tokens.source?.length} source tokens together${both ? "; every step of the decoder reads its output" : ""}`],
    decoder: [`Step ${step + 1} of ${steps}: reads `, fed(words[step]), step ? ` after ${step} before it` : ""],
    output: walked === "source" ? ["For each token"] : step + 1 === steps ? ["The last step"]
      : ["What follows: ", fed(words[step + 1], true), ", which the decoder reads next"],
  };
  for (const when of document.querySelectorAll("[data-when]")) when.replaceChildren(...texts[when.dataset.when]);
}

const lowered = (line) => line.split(/_(\w+)/).map((part, i) => (i % 2 ? make("sub", part) : part)); // W_Q: Q is a subscript

function showStage() {
  showWhen();
  for (const button of document.querySelectorAll("[data-stage]")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.stage) === state.stage));
  }
  at("stage").hidden = state.stage === null;
  if (state.stage === null) return;
  const stage = STAGES[state.stage], rows = [stage, ...stage.products];
  const layers = stage.layers.length ? `, ${layersText(stage.layers)}` : "";
  const formula = box("div", "formula", ...stage.formula.map((line) => box("div", "", ...lowered(line))));
  const top = box("tr", "", make("td", ""), make("th", "shapes", { colSpan: 2, scope: "colgroup" }),
    make("th", stage.part === "encoder" || walked === "source" ? "here" : `at step ${state.step + 1}`, { colSpan: 2, scope: "colgroup" }));
  const sides = ["in", "out", "in", "out"].map((text) => make("th", text, { scope: "col" }));
  const body = rows.map((each) => {
    const cells = [symbols, numbers].flatMap((write) => [each.reads, each.makes].map((side) => make("td", shapesOf(side, write))));
    return box("tr", "", make("th", lastName(each), { scope: "row" }), ...cells);
  });
  const table = box("div", "scroll", box("table", "", top, box("tr", "", make("td", ""), ...sides), ...body));
  Object.assign(table, { tabIndex: 0 }).setAttribute("aria-label", "Shapes");
  table.setAttribute("role", "region");
  const used = new Set(rows.flatMap((each) => [...each.reads, ...each.makes].flat().map(([name]) => name)));
  const meanings = Object.entries(DATA.symbols).filter(([name]) => used.has(name))
    .map(([name, meaning]) => `${name} ${meaning}${growing(name) ? ` (so far ${state.step + 1})` : ""}`);
  const count = stage.parameters ? `${stage.parameters.toLocaleString("en")} parameters${stage.layers.length > 1 ? " in each layer" : ""}` : "";
  const facts = [count, meanings.join(", ")].filter(Boolean).join(".  ");
  const left = box("div", "", make("h3", `${titleOf(stage)}${layers}`), formula, make("p", facts, { className: "soft" }));
  at("stage").replaceChildren(left, table);
}
