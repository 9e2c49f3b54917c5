"use strict";
// Weights as colors: the small pictures of the overview, and the large map with its tokens.

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
let ramp = [];
function readTheme() {
  const hex = variable("--ramp").split(",").map((c) => parseInt(c.trim().slice(1), 16));
  const stops = hex.map((c) => [c >> 16, (c >> 8) & 255, c & 255]);
  ramp = Array.from({ length: 256 }, (_, i) => {
    const place = (i / 255) * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((c, j) => Math.round(c + (stops[low + 1][j] - c) * (place - low)));
  });
}
const color = (shade) => ramp[Math.round(255 * Math.min(Math.max(shade, 0), 1))];
const css = (rgb) => `rgb(${rgb})`;
const inkOn = ([r, g, b]) => (.3 * r + .59 * g + .11 * b > 118 ? "#10151b" : "#fff");

function shades(values, rows, columns) {
  const { shade } = SCALES[state.scale], out = new Float32Array(values.length);
  for (let q = 0; q < rows; q++) {
    const row = values.subarray(q * columns, (q + 1) * columns), top = row.reduce((a, b) => Math.max(a, b), 0);
    for (let k = 0; k < columns; k++) out[q * columns + k] = shade(row[k], top);
  }
  return out;
}
function paint(canvas, values, rows, columns, most) { // a pixel a cell, or, beyond `most` a side, the strongest cell of each
  const height = canvas.height = Math.min(rows, most), width = canvas.width = Math.min(columns, most);
  const pooled = new Float32Array(height * width), all = shades(values, rows, columns);
  for (let q = 0; q < rows; q++) for (let k = 0; k < columns; k++) {
    const i = Math.floor((q * height) / rows) * width + Math.floor((k * width) / columns);
    pooled[i] = Math.max(pooled[i], all[q * columns + k]);
  }
  const image = new ImageData(width, height);
  pooled.forEach((shade, i) => image.data.set([...color(shade), 255], 4 * i));
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

let painted = null, frame = null; // the picture of the large map's cells, and where they lie: { left, top, cell }
function showMap() {
  const kind = state.kind, [, , rows, columns] = MAPS[kind].shape, { layer, head } = state.pick[kind];
  painted = paint(document.createElement("canvas"), picked(kind), rows, columns, 4096);
  at("name").textContent = `${MAPS[kind].title}, ${nameOf(state.pick[kind])}`;
  at("large").setAttribute("aria-label", `Weights, ${rows} by ${columns}; the line above this map tells its marked row`);
  at("habits").textContent = habits(kind);
  for (const button of at("grid").querySelectorAll("button")) {
    const chosen = button.dataset.place === `${layer} ${head}`;
    button.setAttribute("aria-pressed", chosen);
    button.tabIndex = chosen ? 0 : -1;
  }
  layOut();
}

const shortened = (word) => ([...word].length > 14 ? `${[...word].slice(0, 13).join("")}…` : word);
const fontOf = (size, bold) => `${bold ? "bold " : ""}${size}px ${variable("--code")}`;
function layOut() { // fits the large map to the space available, in whole pixels where cells are large enough
  const kind = state.kind, [, , rows, columns] = MAPS[kind].shape, canvas = at("large"), pen = canvas.getContext("2d");
  pen.font = fontOf(13, true);
  const widest = (spans) => Math.max(...spans.map(({ text }) => pen.measureText(shortened(text)).width));
  const left = widest(SPANS[MAPS[kind].query]) + 22, long = widest(SPANS[MAPS[kind].key]) + 14;
  const free = at("map").clientWidth - left - 2;
  const slanted = (free - .7 * long) / columns >= 26, top = slanted ? .7 * long + 10 : long, right = slanted ? .7 * long : 2;
  // In a narrow window a map of few tokens keeps cells that can be read and touched, and scrolls in its box.
  const least = Math.max(rows, columns) <= 64 ? 18 : 0;
  const fit = Math.min(Math.max((free - right) / columns, least), 46), cell = fit >= 4 ? Math.floor(fit) : fit;
  const width = left + columns * cell + right, height = top + rows * cell + 2, pixels = window.devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * pixels, height * pixels];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  pen.scale(pixels, pixels);
  frame = { left, top, cell, slanted, width, height };
  draw();
}

function draw() {
  const kind = state.kind, [, , rows, columns] = MAPS[kind].shape, pen = at("large").getContext("2d");
  const { left, top, cell } = frame, here = state.hover ?? { query: queryOf(kind), key: null };
  pen.clearRect(0, 0, frame.width, frame.height);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(painted, left, top, columns * cell, rows * cell);
  pen.fillStyle = variable("--page");
  if (cell >= 8) for (let i = 1; i < Math.max(rows, columns); i++) {
    if (i < rows) pen.fillRect(left, top + i * cell - .5, columns * cell, 1);
    if (i < columns) pen.fillRect(left + i * cell - .5, top, 1, rows * cell);
  }
  if (cell >= 30) drawNumbers(pen);
  pen.lineWidth = 2;
  pen.strokeStyle = variable("--mark");
  pen.strokeRect(left, top + here.query * cell, columns * cell, cell);
  pen.strokeStyle = variable("--ink");
  if (here.key !== null) pen.strokeRect(left + here.key * cell, top, cell, rows * cell);
  drawLabels(pen, here);
}

function drawNumbers(pen) {
  const [, , rows, columns] = MAPS[state.kind].shape, values = picked(state.kind), all = shades(values, rows, columns);
  const { left, top, cell } = frame;
  [pen.font, pen.textAlign, pen.textBaseline] = [`11px ${variable("--text")}`, "center", "middle"];
  for (let i = 0; i < values.length; i++) {
    if (values[i] < .005) continue;
    pen.fillStyle = inkOn(color(all[i]));
    const text = values[i] >= .995 ? "1" : values[i].toFixed(2).slice(1);
    pen.fillText(text, left + (i % columns + .5) * cell, top + (Math.floor(i / columns) + .5) * cell + .5);
  }
}

function drawLabels(pen, here) { // the tokens; where they would overlap, every so many and the marked ones
  const { left, top, cell, slanted } = frame, size = Math.min(Math.max(cell - 1, 9), 13);
  const every = Math.ceil((size + 1) / cell), { query, key } = MAPS[state.kind];
  pen.textBaseline = "middle";
  const label = (spans, place, write, bracket) => spans.forEach(({ first, last, text }) => {
    const marked = place !== null && first <= place && place < last;
    if (!marked && (first % every || (place !== null && Math.abs(first - place) < every))) return;
    pen.font = fontOf(size, marked);
    pen.fillStyle = variable(marked ? "--mark" : "--ink");
    write(shortened(text), (first + last) / 2);
    if (last > first + 1) bracket(first * cell + 2, (last - first) * cell - 4); // tokens that share characters
  });
  pen.textAlign = "right";
  label(SPANS[query], here.query, (text, middle) => pen.fillText(text, left - 8, top + middle * cell),
    (from, length) => pen.fillRect(left - 5, top + from, 2, length));
  pen.textAlign = "left";
  label(SPANS[key], here.key, (text, middle) => {
    pen.save();
    pen.translate(left + middle * cell, top - 7);
    pen.rotate(slanted ? -Math.PI / 4 : -Math.PI / 2);
    pen.fillText(text, 0, 0);
    pen.restore();
  }, (from, length) => pen.fillRect(left + from, top - 5, length, 2));
}
