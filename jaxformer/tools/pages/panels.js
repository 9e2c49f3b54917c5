"use strict";
// What a step shows beside its weights: the masks, the beams and the logit lens.

const MASK_TITLES = { encoder: "Encoder: padding", decoder: "Decoder: causal", cross: "Cross: padding of the source" };

function maskOf(kind, layer) { // 1 where a key may be attended to, [queries × keys]
  const { bits, layers } = DATA.masks[kind], [, , rows, columns] = MAPS[kind].shape;
  const bytes = Uint8Array.from(atob(bits[layers[layer]]), (c) => c.charCodeAt(0));
  return Uint8Array.from({ length: rows * columns }, (_, i) => (bytes[i >> 3] >> (7 - (i & 7))) & 1);
}
function rgb(name) { // of a color of the theme
  const hex = parseInt(variable(name).trim().slice(1), 16);
  return [hex >> 16, (hex >> 8) & 255, hex & 255, 255];
}
function maskFigure(kind) {
  const [, , rows, columns] = MAPS[kind].shape, { layer } = state.pick[kind], query = queryOf(kind), mask = maskOf(kind, layer);
  const canvas = make("canvas", "", { width: columns, height: rows }), colors = [rgb("--unseen"), rgb("--seen")];
  const image = new ImageData(columns, rows);
  mask.forEach((bit, i) => image.data.set(colors[bit], 4 * i));
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.setAttribute("role", "img");
  canvas.dataset.mask = kind;
  const shown = box("div", "", canvas), share = 100 / rows;
  if (Math.max(rows, columns) <= 48) shown.append(make("i", "", { className: "lines", style: `background-size: ${100 / columns}% ${share}%` }));
  if (MAPS[kind].query === walked && walked === "target" && query + 1 < rows) {
    shown.append(make("i", "", { className: "later", style: `top: ${share * (query + 1)}%` }));
  }
  shown.append(make("i", "", { className: "now", style: `top: ${share * query}%; height: ${share}%` }));
  canvas.addEventListener("click", (event) => go(MAPS[kind].query, Math.floor((event.offsetY / canvas.clientHeight) * rows)));
  const count = mask.subarray(query * columns, (query + 1) * columns).reduce((a, b) => a + b, 0);
  const differ = DATA.masks[kind].bits.length > 1 ? `, layer ${layerName(layer)}` : "";
  const name = make("b", `${MASK_TITLES[kind]}${differ}`);
  const says = `“${queriesOf(kind)[query]}” may attend to ${count} of ${columns} tokens`;
  canvas.setAttribute("aria-label", `${name.textContent}: ${rows} queries by ${columns} keys. ${says}`);
  return box("figure", "mask", shown, box("figcaption", "soft", name, make("br", ""), says));
}
function showMasks() {
  at("masks").hidden = !Object.keys(DATA.masks).length;
  at("figures").replaceChildren(...kinds.filter((kind) => DATA.masks[kind]).map(maskFigure));
}

const header = (...texts) => {
  const cells = texts.map(([text, className]) => make("th", text, { className, scope: "col" }));
  return box("tr", "", ...cells);
};
const ending = (text, most) => ([...text].length > most ? `…${[...text].slice(-most).join("")}` : text);
function showBeams() {
  at("beams").hidden = !DATA.beams.length;
  const found = DATA.beams[state.step] ?? [], word = WORDS[walked][state.step];
  at("searched").textContent = found.length
    ? `Texts that the search compares after “${word}”, with the log-probability of the whole text in nats. A finished text is`
      + " ranked by its score, which is divided by the length penalty. Marked: what leads to the text shown here."
    : "The search chose nothing at this step.";
  const rows = found.map(({ before, token, log_probability, score, state: fate, leads }) => {
    const cells = [
      make("td", ending(before, 18), { title: before, className: "before" }), make("td", token, { className: "token" }),
      make("td", log_probability.toFixed(3), { className: "number" }),
      box("td", "", make("span", fate, { className: "state" })),
      make("td", score === null ? "" : score.toFixed(3), { className: "number" }),
    ];
    return box("tr", `${fate}${leads ? " leads" : ""}`, ...cells);
  });
  const top = header(["so far", "before"], ["next", ""], ["log p", "number"], ["", ""], ["score", "number"]);
  at("ranking").replaceChildren(...(rows.length ? [top, ...rows] : []));
}

function showLens() {
  at("lenses").hidden = !DATA.lens.length;
  if (!DATA.lens.length) return;
  const next = walked === "target" ? DATA.tokens[walked][state.step + 1] : undefined;
  const following = next === undefined ? "" : ` Framed: what follows, “${WORDS[walked][state.step + 1]}”.`;
  at("through").textContent = "The most probable texts if the final norm and the head read the output of each layer "
    + `${walked === "target" ? "after" : "at"} “${WORDS[walked][state.step]}”.${following}`;
  at("lens").replaceChildren(...DATA.lens.map((ofLayer, layer) => {
    const name = make("th", `layer ${layerName(layer)}`, { scope: "row" });
    return box("tr", "", name, ...ofLayer[state.step].map(([word, share]) => {
      const rgbOf = color(Math.sqrt(share)), cell = box("td", word === next ? "next" : "", `${shortened(word)} `, make("small", percent(share)));
      Object.assign(cell.style, { background: css(rgbOf), color: inkOn(rgbOf) });
      return Object.assign(cell, { title: `${word}: ${share}` });
    }));
  }));
}
