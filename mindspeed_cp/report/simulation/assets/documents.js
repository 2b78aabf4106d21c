// Documents: a strip of all of them, and the tiles of the chosen one, by the ranks that compute them.

const map = { layout: null, entries: [], chosen: 0, doc: null, view: null, hover: null };

function rankColour(rank) { // a hue for each node, a lightness for each rank in it; in one node a hue for each rank
  const per = PROBLEM.ranks_per_node, local = rank % per;
  const hue = PROBLEM.nodes > 1 ? 205 + node(rank) * 360 / PROBLEM.nodes : local * 360 / per;
  const light = PROBLEM.nodes > 1 ? 34 + 40 * local / Math.max(per - 1, 1) : [42, 56][local % 2];
  return `hsl(${hue % 360} 58% ${light}%)`;
}

function groupColour(ranks) { // of ranks that share heads: their node's, or grey where they are of several
  if (ranks.length === 1) return rankColour(ranks[0]);
  const nodes = new Set(ranks.map(node));
  return nodes.size > 1 || PROBLEM.nodes === 1 ? colour("shared") : rankColour(ranks[0] - ranks[0] % PROBLEM.ranks_per_node +
    Math.floor(PROBLEM.ranks_per_node / 2));
}

function runs(flat) { // [group, rows, ...] as {ranks, from, to} by position
  const out = [];
  for (let i = 0, now = 0; i < flat.length; i += 2) {
    out.push({ ranks: map.layout.groups[flat[i]], from: now, to: now + flat[i + 1] });
    now += flat[i + 1];
  }
  return out;
}

function spread(entry) { // who has a document: one rank, ranks of a node, ranks of several nodes
  const ranks = new Set(runs(entry[1]).flatMap((run) => run.ranks)), nodes = new Set([...ranks].map(node));
  return { ranks, nodes, shade: ranks.size === 1 ? "forward" : nodes.size === 1 ? "near" : "far" };
}

function drawStrip() {
  const canvas = at("strip"), width = canvas.clientWidth, height = 46, context = fitted(canvas, width, height);
  const total = map.entries.reduce((sum, entry) => sum + PROBLEM.lengths[entry[0]], 0);
  const least = Math.min(3, width / map.entries.length), room = width - least * map.entries.length;
  let left = 0;
  map.places = map.entries.map((entry, index) => {
    const long = least + room * PROBLEM.lengths[entry[0]] / total;
    context.fillStyle = colour(entry.spread.shade);
    context.fillRect(left, 6, Math.max(long - 1, 0.7), height - 12);
    if (index === map.chosen) {
      context.strokeStyle = colour("text");
      context.lineWidth = 2;
      context.strokeRect(left, 3, Math.max(long - 1, 2), height - 6);
    }
    left += long;
    return left;
  });
}

function entryAt(event) {
  const place = event.clientX - at("strip").getBoundingClientRect().left;
  return map.places.findIndex((end) => place < end);
}

function toldEntry(entry) {
  const { ranks, nodes } = entry.spread;
  return [`document ${entry[0]}: ${number(PROBLEM.lengths[entry[0]])} tokens`,
    ranks.size === 1 ? `whole on rank ${[...ranks][0]}` :
      `computed by ${ranks.size} ranks of ${nodes.size} node${nodes.size > 1 ? "s" : ""}`];
}

function chooseDocument(index) {
  map.chosen = index;
  const entry = map.entries[index];
  const queries = runs(entry[1]), keys = entry[2] ? runs(entry[2]) : queries;
  map.doc = { number: entry[0], length: PROBLEM.lengths[entry[0]], queries, keys };
  at("document").textContent = toldEntry(entry).join(", ");
  document.body.dataset.document = entry[0];
  for (const swatch of document.querySelectorAll("#ranks i"))
    swatch.classList.toggle("used", entry.spread.ranks.has(Number(swatch.textContent)));
  drawStrip();
  wholeDocument();
}

function wholeDocument() {
  map.view = { left: 0, top: 0, span: map.doc.length };
  drawTiles();
}

function drawTiles() {
  const canvas = at("tiles"), size = canvas.clientWidth, context = fitted(canvas, size, size);
  const { doc, view } = map, scale = size / view.span, [left, right] = PROBLEM.reach;
  const px = (key) => (key - view.left) * scale, py = (query) => (query - view.top) * scale;
  Object.assign(canvas.dataset, { size, left: view.left, top: view.top, span: view.span });
  context.save(); // what the mask lets through: a query sees keys from query - left to query + right
  context.beginPath();
  const end = doc.length, corner = (key, query) => context.lineTo(px(key), py(query));
  corner(0, 0);
  corner(Math.min(right + 1, end), 0);
  corner(end, Math.max(0, end - right - 1));
  corner(end, end);
  corner(Math.max(0, end - left - 1), end);
  corner(0, Math.min(end, left + 1));
  context.clip();
  for (const query of doc.queries) { // the colour is that of the query's rank, whatever the key
    if (query.to < view.top || query.from > view.top + view.span) continue;
    context.fillStyle = groupColour(query.ranks);
    context.fillRect(px(0), py(query.from), px(end) - px(0), py(query.to) - py(query.from));
  }
  context.fillStyle = colour("card");
  context.globalAlpha = 0.55;
  const thick = (run) => (run.to - run.from) * scale > 2.5; // lines would cover what is thinner
  for (const query of doc.queries.slice(1).filter(thick)) context.fillRect(px(0), py(query.from) - 0.5, px(end) - px(0), 1);
  for (const key of doc.keys.slice(1).filter(thick)) context.fillRect(px(key.from) - 0.5, py(0), 1, py(end) - py(0));
  context.restore();
  if (map.hover) {
    const { query, key } = map.hover;
    context.strokeStyle = colour("text");
    context.lineWidth = 2;
    context.strokeRect(px(key.from), py(query.from), px(key.to) - px(key.from), py(query.to) - py(query.from));
  }
}

function tileAt(event) {
  const box = at("tiles").getBoundingClientRect(), scale = map.view.span / box.width;
  const k = map.view.left + (event.clientX - box.left) * scale, q = map.view.top + (event.clientY - box.top) * scale;
  const query = map.doc.queries.find((run) => q >= run.from && q < run.to);
  const key = map.doc.keys.find((run) => k >= run.from && k < run.to);
  return query && key && pairs(query, key) ? { query, key } : null;
}

function pairs(query, key) { // that the mask lets through, in whole numbers
  const [left, right] = PROBLEM.reach;
  const seen = (from, to, bound) => { // queries of from .. to-1, each with max(0, min(its bound, keys)) keys from the left
    const keys = key.to - key.from, first = from + bound - key.from, last = to - 1 + bound - key.from;
    if (last < 0) return 0;
    const low = Math.max(first, 0), high = Math.min(last, keys); // the bound rises by one from query to query
    const rising = high >= low ? (low + high) * (high - low + 1) / 2 : 0;
    return rising + keys * Math.max(0, last - Math.max(keys, first - 1));
  };
  return seen(query.from, query.to, right + 1) - seen(query.from, query.to, -left);
}

function ranksText(ranks) {
  const [first, last] = [ranks[0], ranks[ranks.length - 1]];
  if (ranks.length === 1) return `rank ${first} (node ${node(first)})`;
  return last - first === ranks.length - 1 ? `ranks ${first}–${last}` : `${ranks.length} ranks from ${first} to ${last}`;
}

function toldTile({ query, key }) {
  const rows = key.to - key.from, size = rows * PROBLEM.kv_heads * (PROBLEM.head_dim + PROBLEM.head_dim_v) * 2;
  const shared = query.ranks.length > 1, own = key.ranks.join() === query.ranks.join();
  const across = key.ranks.some((a) => query.ranks.some((b) => node(a) !== node(b)));
  return [`document ${map.doc.number}: queries ${number(query.from)}–${number(query.to - 1)} × keys ` +
    `${number(key.from)}–${number(key.to - 1)}`,
    `computed by ${ranksText(query.ranks)}` + (shared ? ", each for some of the heads" : ""),
    own ? `keys and values are there: ${bytes(size)}` :
      `keys and values, ${bytes(size)}, are those of ${ranksText(key.ranks)}, ${across ? "between nodes" : "inside the node"}`,
    `${number(pairs(query, key))} pairs`];
}

function startDocuments() {
  const strip = at("strip"), tiles = at("tiles");
  let drag = null;
  const key = (shade, text) => {
    const made = element("span", undefined, { class: "key" });
    made.append(element("i", "", { style: `background:var(--${shade})` }), text);
    return made;
  };
  const legend = at("strip-legend");
  legend.append("the longest first, as wide as they are long: ", key("forward", "whole on one rank "), " ", key("near", "shared in a node "));
  if (PROBLEM.nodes > 1) legend.append(" ", key("far", "shared by nodes "));
  legend.append(" · click one to see its tiles");
  for (let n = 0; n < PROBLEM.nodes && n < 16; n++) {
    const line = element("div", undefined, { class: "node" });
    line.append(element("span", "node " + n));
    for (let rank = n * PROBLEM.ranks_per_node; rank < (n + 1) * PROBLEM.ranks_per_node; rank++)
      line.append(element("i", rank, { style: `background:${rankColour(rank)}` }));
    at("ranks").append(line);
  }
  strip.onpointermove = (event) => {
    const index = entryAt(event);
    if (index >= 0) tip.show(event, toldEntry(map.entries[index]));
  };
  strip.onpointerleave = tip.hide;
  strip.onclick = (event) => { const index = entryAt(event); if (index >= 0) chooseDocument(index); };
  const place = (event) => {
    const box = tiles.getBoundingClientRect(), scale = map.view.span / box.width;
    return [map.view.left + (event.clientX - box.left) * scale, map.view.top + (event.clientY - box.top) * scale];
  };
  const move = (span, k, q, event) => { // so that key k and query q are below the pointer
    const box = tiles.getBoundingClientRect(), most = map.doc.length;
    span = Math.min(most, Math.max(span, 16));
    const keep = (value) => Math.max(0, Math.min(value, most - span));
    map.view = { span, left: keep(k - (event.clientX - box.left) / box.width * span),
      top: keep(q - (event.clientY - box.top) / box.height * span) };
  };
  tiles.onwheel = (event) => {
    event.preventDefault();
    move(map.view.span * (event.deltaY > 0 ? 1.25 : 0.8), ...place(event), event);
    drawTiles();
  };
  tiles.onpointerdown = (event) => { drag = place(event); tiles.setPointerCapture(event.pointerId); };
  tiles.onpointerup = () => { drag = null; };
  tiles.onpointermove = (event) => {
    if (drag) move(map.view.span, ...drag, event);
    map.hover = tileAt(event);
    drawTiles();
    if (map.hover) tip.show(event, toldTile(map.hover)); else tip.hide();
  };
  tiles.onpointerleave = () => { map.hover = null; tip.hide(); drawTiles(); };
  tiles.ondblclick = wholeDocument;
  at("whole-document").onclick = wholeDocument;
  listeners.push((one) => {
    const before = map.doc && map.doc.number;
    map.layout = DATA.layouts[one.layout];
    map.entries = map.layout.documents;
    for (const entry of map.entries) entry.spread ||= spread(entry);
    chooseDocument(Math.max(0, map.entries.findIndex((entry) => entry[0] === before)));
  });
  addEventListener("resize", () => { drawStrip(); drawTiles(); });
}

start().catch((error) => { at("problem").textContent = "This page needs a browser of 2023 or later: " + error; });
