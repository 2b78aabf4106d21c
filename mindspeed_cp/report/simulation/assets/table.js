// Data, words and numbers, the table of algorithms, and what stands above the timeline of the chosen one.
"use strict";

let DATA, PROBLEM; // set by start()
const state = { chosen: 0, sort: "seconds", descending: false, filter: "" };
const listeners = []; // called when another algorithm is chosen

const at = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const number = (value) => value.toLocaleString("en-US");
const seconds = (units) => units * DATA.unit;
const node = (rank) => Math.floor(rank / PROBLEM.ranks_per_node);

function time(value) { // seconds in words
  for (const [size, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]])
    if (value >= size * 0.9995 || unit === "µs") return significant(value / size) + " " + unit;
}

function significant(value) {
  return value >= 1000 ? number(Math.round(value)) : value.toFixed(value >= 100 ? 1 : 2);
}

function bytes(value) {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (value >= size) return (value / size).toFixed(1) + " " + unit;
  return value + " B";
}

function some(items, all, word) { // "documents 4, 7, 9 and 20 more"
  if (!all) return "";
  const more = all - items.length;
  return word + (all > 1 ? "s " : " ") + items.join(", ") + (more > 0 ? " and " + number(more) + " more" : "");
}

function element(name, text, attributes) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  return made;
}

const milliseconds = (value) => (value * 1e3).toFixed(DATA.bound >= 1e-3 ? 2 : 4);
const reason = (one) => one.causes.length ? one.causes[0][0] : "nothing";
const COLUMNS = [ // heading, key to sort by, what a cell shows, whether large is good, what it means
  ["algorithm", "name", (one) => one.name, false, "with its options"],
  ["layer, ms", "seconds", (one) => milliseconds(one.seconds), false, "until the last rank is done"],
  ["× even ring", "speedup", (one) => one.speedup.toFixed(2), true, "time of the even ring over this one's"],
  ["of the bound", "fraction", (one) => (100 * one.fraction).toFixed(0) + " %", true,
    "time of perfect balance with nothing exposed over this one's; no plan reaches 100 %"],
  ["imbalance", "imbalance", (one) => one.imbalance.toFixed(3), false,
    "busy time of the busiest rank over the mean; 1 is even"],
  ["compute, ms", "compute", (one) => milliseconds(one.compute), false, "kernels of attention and linear layers"],
  ["exposed, ms", "exposed", (one) => milliseconds(one.exposed), false, "a rank waits for messages that are due"],
  ["hidden, ms", "hidden", (one) => milliseconds(one.hidden), true, "a rank computes while messages reach it"],
  ["sent, rank", "sent", (one) => bytes(Math.round(one.sent)), false, "bytes that a rank sends, mean"],
  ["memory", "memory", (one) => bytes(Math.round(one.memory)) + (one.memory > PROBLEM.memory ? " (too much)" : ""), false,
    "of attention at its fullest moment, on the fullest rank"],
  ["waits most for", "reason", (one) => reason(one), false, "the largest part of the time in which ranks do not compute"],
];

function table() {
  const head = at("algorithms").tHead, body = at("algorithms").tBodies[0];
  const row = element("tr");
  for (const [heading, key, , good, meaning] of COLUMNS) {
    const cell = element("th", heading, { title: meaning, "data-key": key, tabindex: "0" });
    if (state.sort === key) cell.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
    const sort = () => {
      state.descending = state.sort === key ? !state.descending : good;
      state.sort = key;
      table();
    };
    cell.onclick = sort;
    cell.onkeydown = (event) => { if (event.key === "Enter") sort(); };
    row.append(cell);
  }
  head.replaceChildren(row);
  const value = (one) => state.sort === "reason" ? reason(one) : one[state.sort];
  const order = DATA.algorithms.map((one, index) => [one, index])
    .filter(([one]) => (one.name + " " + reason(one)).toLowerCase().includes(state.filter))
    .sort(([a], [b]) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (state.descending ? -1 : 1));
  body.replaceChildren(...order.map(([one, index]) => {
    const line = element("tr", undefined, { "data-name": one.name, tabindex: "0" });
    if (index === state.chosen) line.className = "chosen";
    for (const [, key, shown] of COLUMNS) {
      const cell = element("td", shown(one));
      if (key === "fraction") cell.prepend(element("span", "", { class: "share", style: `width:${56 * one.fraction}px` }));
      line.append(cell);
    }
    line.onclick = () => choose(index);
    line.onkeydown = (event) => { if (event.key === "Enter") choose(index); };
    return line;
  }));
}

function choose(index) {
  state.chosen = index;
  document.body.dataset.chosen = DATA.algorithms[index].name;
  table();
  chosen();
  for (const listener of listeners) listener(DATA.algorithms[index]);
}

function chosen() { // the line of parts, and why ranks wait
  const one = DATA.algorithms[state.chosen];
  at("name").textContent = one.name;
  at("verdict").textContent = `${time(one.seconds)} a layer, ${one.speedup.toFixed(2)} times as fast as the even ring, ` +
    `${(100 * one.fraction).toFixed(0)} % of the bound of ${time(DATA.bound)}` +
    (PROBLEM.batches > 1 ? `; means of ${PROBLEM.batches} batches, pictures are of the first` : "");
  const parts = [["attention", "forward"], ["linear", "linear"], ["exposed", "exposed"], ["late", "late"]];
  const names = { attention: "attention", linear: "linear layers", exposed: "waits for messages", late: "waits for the slowest" };
  at("parts").replaceChildren(...parts.filter(([key]) => one[key] > 0).map(([key, shade]) => element(
    "div", `${names[key]} ${time(one[key])}`,
    { class: key, style: `flex:${100 * one[key] / one.seconds} 0 0; background:var(--${shade})`, title: `${names[key]}: ${time(one[key])}, mean of ranks` })));
  at("causes").replaceChildren(...one.causes.map(([name, value]) => element(
    "li", `${time(value)} (${(100 * value / one.seconds).toFixed(1)} %) waiting for ${name}`)));
}

async function start() { // the data is JSON, packed by gzip and written in base64
  const packed = Uint8Array.from(atob(at("data").textContent.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  DATA = JSON.parse(await new Response(stream).text());
  PROBLEM = DATA.problem;
  page();
  startTimeline();
  startDocuments();
  choose(0);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => choose(state.chosen));
}

function page() { // what does not change
  const tokens = PROBLEM.lengths.reduce((a, b) => a + b, 0), ranks = PROBLEM.nodes * PROBLEM.ranks_per_node;
  at("problem").textContent = `${number(PROBLEM.lengths.length)} documents, ${number(tokens)} tokens, over ${ranks} ranks: ` +
    `${PROBLEM.nodes} node${PROBLEM.nodes > 1 ? "s" : ""} of ${PROBLEM.ranks_per_node} of cluster ${PROBLEM.cluster}; ` +
    `${PROBLEM.heads} heads (${PROBLEM.kv_heads} of keys and values) of ${PROBLEM.head_dim}${PROBLEM.head_dim_v === PROBLEM.head_dim ? "" : "/" + PROBLEM.head_dim_v} channels, ${PROBLEM.attention}. ` +
    `Lengths: ${PROBLEM.source}.`;
  at("refused").replaceChildren(...DATA.refused.map((one) => element("p", `${one.name} cannot run this: ${one.reason}`)));
  at("notes").replaceChildren(...DATA.notes.map((note) => element("p", `Note: ${note}.`)));
  at("filter").oninput = () => { state.filter = at("filter").value.trim().toLowerCase(); table(); };
}

const tip = { // the box beside the pointer
  show(event, lines) {
    const box = at("tip");
    box.replaceChildren(...lines.filter((line) => line).map((line, i) => element(i ? "div" : "b", line)));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 6)) + "px";
    box.style.top = Math.max(4, event.clientY + 16 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 16) + "px";
  },
  hide() { at("tip").hidden = true; },
};

function fitted(canvas, width, height) { // a canvas of so many CSS pixels: its context, scaled
  const ratio = devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return context;
}
