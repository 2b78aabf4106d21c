// The timeline: a row for each rank with its kernels and waits, below them the messages that reach it.

const LEFT = 74, RIGHT = 150, TOP = 24;
const line = { one: null, bars: [], from: 0, to: 1, width: 0, row: 16, hover: null };

function barsOf(one) { // everything that is drawn, in units of time; made once for each algorithm
  if (one.bars) return one.bars;
  const bars = one.bars = [];
  const row = new Map(one.ranks.map((rank, index) => [rank, index]));
  const ends = [];
  one.directions.forEach((direction, back) => {
    const waits = new Map(direction.waits.map((wait) => [wait[0] + " " + wait[1], wait]));
    direction.times.forEach((deltas, index) => {
      const rank = one.ranks[index];
      let now = deltas[0];
      if (back) bars.push({ row: index, rank, lane: 0, shade: "linear", from: ends[index], to: now });
      for (let i = 1; i < deltas.length; i += 2) {
        const step = (i - 1) / 2, [kernel, wait] = [deltas[i], deltas[i + 1]];
        if (kernel > 0)
          bars.push({ row: index, rank, lane: 0, shade: direction.steps[step] ? direction.name : "linear", from: now,
            to: now + kernel, direction, step, tiles: direction.tiles[index] && direction.tiles[index][step] });
        now += kernel;
        if (wait > 0)
          bars.push({ row: index, rank, lane: 0, shade: "exposed", from: now, to: now + wait, direction, step,
            wait: waits.get(rank + " " + step) });
        now += wait;
      }
      ends[index] = now;
      if (back && one.total > now) bars.push({ row: index, rank, lane: 0, shade: "late", from: now, to: one.total });
    });
    for (const message of direction.messages)
      bars.push({ row: row.get(message[0]), rank: message[0], lane: 1 + message[4], shade: message[4] ? "far" : "near",
        from: message[8], to: message[8] + message[9], direction, message });
  });
  return bars;
}

function tracks(row) { // [top, height] of kernels, messages inside the node, messages between nodes
  const top = TOP + row * line.row, high = line.row - 2, kernels = Math.round(high * 0.56);
  const each = (high - kernels) / (PROBLEM.nodes > 1 ? 2 : 1);
  return [[top, kernels], [top + kernels, each], [top + kernels + each, each]];
}

const x = (units) => LEFT + (units - line.from) / (line.to - line.from) * line.width;

function drawTimeline() {
  const canvas = at("timeline"), one = line.one, width = canvas.clientWidth;
  line.row = Math.max(12, Math.min(26, Math.floor(640 / one.ranks.length)));
  line.width = width - LEFT - RIGHT;
  const height = TOP + one.ranks.length * line.row + 4, context = fitted(canvas, width, height);
  Object.assign(canvas.dataset, { left: LEFT, top: TOP, width: line.width, row: line.row, from: line.from, to: line.to });
  axis(context, height);
  labels(context, width);
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, line.width, height);
  context.clip();
  const shades = {};
  for (const bar of barsOf(one)) {
    if (bar.to < line.from || bar.from > line.to) continue;
    const [top, high] = tracks(bar.row)[bar.lane];
    context.fillStyle = shades[bar.shade] ||= colour(bar.shade);
    context.globalAlpha = bar.lane ? 0.75 : 1;
    const left = x(bar.from);
    const long = Math.max(x(bar.to) - left, 0.6);
    context.fillRect(left, top, long, high);
    if (!bar.lane && long > 3 && bar.shade !== "late") { // a gap, so that steps can be told apart
      context.fillStyle = shades.card ||= colour("card");
      context.globalAlpha = 0.5;
      context.fillRect(left + long - 0.5, top, 0.5, high);
    }
  }
  context.globalAlpha = 1;
  if (line.hover) outline(context, line.hover);
  context.restore();
  balance(context, width);
}

function axis(context, height) {
  const span = seconds(line.to - line.from), about = span / Math.max(2, line.width / 110);
  const power = 10 ** Math.floor(Math.log10(about)), step = [1, 2, 5, 10].find((n) => n * power >= about) * power;
  context.fillStyle = colour("quiet");
  context.strokeStyle = colour("line");
  context.textAlign = "center";
  const digits = Math.max(0, -Math.floor(Math.log10(step * 1e3 * 1.0001)));
  for (let tick = Math.ceil(seconds(line.from) / step) * step; tick <= seconds(line.to) * 1.0001; tick += step) {
    const place = x(tick / DATA.unit);
    context.fillText((tick * 1e3).toFixed(digits) + " ms", Math.min(place, LEFT + line.width - 20), TOP / 2 - 2);
    context.beginPath();
    context.moveTo(place, TOP - 5);
    context.lineTo(place, height);
    context.stroke();
  }
  const bound = x(DATA.bound / DATA.unit);
  if (PROBLEM.batches === 1 && bound > LEFT && bound < LEFT + line.width) {
    context.fillStyle = colour("bound");
    context.fillRect(bound - 1, TOP - 6, 2, height);
  }
}

function labels(context) {
  const every = line.row >= 11 ? 1 : 2;
  context.fillStyle = colour("text");
  line.one.ranks.forEach((rank, index) => {
    const top = TOP + index * line.row;
    context.textAlign = "right";
    if (index % every === 0) context.fillText(rank, LEFT - 8, top + line.row / 2 - 1);
    if (index && node(rank) !== node(line.one.ranks[index - 1])) {
      context.fillStyle = colour("axis");
      context.fillRect(0, top - 1.5, LEFT + line.width, 1);
      context.fillStyle = colour("text");
    }
  });
  if (PROBLEM.nodes === 1) return;
  context.textAlign = "left";
  context.fillStyle = colour("quiet");
  for (let index = 0; index < line.one.ranks.length; index++)
    if (!index || node(line.one.ranks[index]) !== node(line.one.ranks[index - 1]))
      context.fillText("node " + node(line.one.ranks[index]), 0, TOP + index * line.row + 7);
}

function balance(context, width) { // at the right: busy time of each rank against the mean
  const { attention, linear } = line.one.per_rank, room = RIGHT - 62, left = width - RIGHT + 12;
  const busy = attention.map((value, rank) => value + linear[rank]);
  const mean = busy.reduce((a, b) => a + b, 0) / busy.length, most = Math.max(...busy, 1e-9);
  context.textAlign = "left";
  context.fillStyle = colour("quiet");
  context.fillText("busy / mean", left, TOP / 2 - 2);
  line.one.ranks.forEach((rank, index) => {
    const top = TOP + index * line.row, high = Math.round((line.row - 2) * 0.7);
    context.fillStyle = colour("forward");
    context.fillRect(left, top + 1, attention[rank] / most * room, high);
    context.fillStyle = colour("linear");
    context.fillRect(left + attention[rank] / most * room, top + 1, linear[rank] / most * room, high);
    context.fillStyle = colour("quiet");
    if (line.row >= 11) context.fillText((busy[rank] / (mean || 1)).toFixed(2), left + room + 8, top + high / 2 + 1);
  });
  context.fillStyle = colour("text");
  context.fillRect(left + mean / most * room, TOP - 2, 1, line.one.ranks.length * line.row);
}

function outline(context, bar) {
  const [top, high] = tracks(bar.row)[bar.lane], left = x(bar.from), long = Math.max(x(bar.to) - left, 2);
  context.strokeStyle = colour("text");
  context.lineWidth = 1.5;
  context.strokeRect(left, top, long, high);
  const sender = bar.message ? line.one.ranks.indexOf(bar.message[1]) : -1;
  if (sender >= 0) { // from the row of the sender
    context.beginPath();
    context.moveTo(left, TOP + sender * line.row + line.row * 0.3);
    context.lineTo(left, top + high / 2);
    context.stroke();
    context.beginPath();
    context.arc(left, TOP + sender * line.row + line.row * 0.3, 3, 0, 7);
    context.fillStyle = colour("text");
    context.fill();
  }
  context.lineWidth = 1;
}

function barAt(event) {
  const box = at("timeline").getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
  const row = Math.floor((py - TOP) / line.row);
  if (px < LEFT || px > LEFT + line.width || row < 0 || row >= line.one.ranks.length) return null;
  const lane = tracks(row).findIndex(([top, high]) => py >= top && py < top + high);
  const units = line.from + (px - LEFT) / line.width * (line.to - line.from), near = 2 / line.width * (line.to - line.from);
  let found = null; // of those below the pointer the shortest: long ones can be pointed at elsewhere
  for (const bar of barsOf(line.one))
    if (bar.row === row && bar.lane === lane && bar.from - near <= units && units <= bar.to + near &&
      (!found || bar.to - bar.from < found.to - found.from)) found = bar;
  return found;
}

function told(bar) { // a bar in words
  const span = `${time(seconds(bar.to - bar.from))}, from ${(seconds(bar.from) * 1e3).toFixed(3)} to ` +
    `${(seconds(bar.to) * 1e3).toFixed(3)} ms`;
  const who = `rank ${bar.rank}, node ${node(bar.rank)}`;
  if (bar.message) {
    const [, peer, count, kind, far, posted, due, size, , , documents, ...listed] = bar.message;
    return [`${DATA.kinds[kind]}, ${bytes(size)} to rank ${bar.rank}`,
      count > 1 ? `${count} messages of ${count} ranks ${far ? "of other nodes" : "of its node"}, the largest from rank ${peer}` :
        `from rank ${peer}, ${far ? "between nodes" : "inside the node"}`,
      `under way ${span}`, `posted in ${bar.direction.name} step ${posted}, due at the end of step ${due}`,
      some(listed, documents, "document")];
  }
  if (bar.shade === "linear" && bar.direction)
    return [`${who}: projections around attention, ${bar.direction.name} step ${bar.step}`, span];
  if (bar.shade === "linear")
    return [`${who}: linear layers, forward and backward`, span, `${number(line.one.per_rank.tokens[bar.rank])} tokens`];
  if (bar.shade === "late") return [`${who}: waits for the slowest rank`, span];
  const step = `${bar.direction.name} step ${bar.step}`;
  const planStep = bar.direction.steps[bar.step] && ` (step ${bar.direction.steps[bar.step]} of the plan)`;
  if (bar.wait) {
    const [, , kind, far, from, to, size] = bar.wait;
    return [`${who}: waits for ${DATA.kinds[kind]}`, span, `at the end of ${step}${planStep}`,
      `last to arrive: ${bytes(size)} from rank ${from} to rank ${to}, ${far ? "between nodes" : "inside the node"}`];
  }
  const lines = [`${who}: attention, ${step}${planStep}`, span];
  if (!bar.tiles) return lines;
  const [tiles, documents, pairs, ...listed] = bar.tiles;
  lines.push(`${number(tiles)} tile${tiles > 1 ? "s" : ""} of ${number(documents)} document${documents > 1 ? "s" : ""}, ` +
    `${number(pairs)} pairs, all heads counted`);
  for (let i = 0; i < listed.length; i += 5)
    lines.push(`document ${listed[i]}: queries ${number(listed[i + 1])}–${number(listed[i + 2])} × keys ` +
      `${number(listed[i + 3])}–${number(listed[i + 4])}`);
  const more = tiles - listed.length / 5;
  lines.push(more > 0 ? `and ${number(more)} smaller tile${more > 1 ? "s" : ""}` : "");
  return lines;
}

function zoom(factor, around) {
  const full = at("same").checked ? Math.max(...DATA.algorithms.map((one) => one.total)) : line.one.total;
  const span = Math.min(full, Math.max((line.to - line.from) * factor, 100));
  const middle = around === undefined ? (line.from + line.to) / 2 : around;
  const share = (middle - line.from) / (line.to - line.from);
  line.from = Math.max(0, Math.min(middle - share * span, full - span));
  line.to = line.from + span;
  drawTimeline();
}

function wholeLayer() {
  line.from = 0;
  line.to = 1;
  zoom(Infinity);
}

function startTimeline() {
  const canvas = at("timeline");
  let drag = null;
  const place = (event) => line.from + (event.clientX - canvas.getBoundingClientRect().left - LEFT) / line.width *
    (line.to - line.from);
  canvas.onwheel = (event) => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event));
  };
  canvas.onpointerdown = (event) => { drag = place(event); canvas.setPointerCapture(event.pointerId); };
  canvas.onpointerup = () => { drag = null; };
  canvas.onpointermove = (event) => {
    if (drag !== null) {
      const moved = drag - place(event);
      line.from += moved;
      line.to += moved;
      zoom(1);
    }
    const bar = barAt(event);
    if (bar !== line.hover) { line.hover = bar; drawTimeline(); }
    if (bar) tip.show(event, told(bar)); else tip.hide();
  };
  canvas.onpointerleave = () => { line.hover = null; tip.hide(); drawTimeline(); };
  canvas.ondblclick = wholeLayer;
  canvas.onkeydown = (event) => {
    const move = { ArrowLeft: -0.1, ArrowRight: 0.1 }[event.key], factor = { "+": 0.8, "-": 1.25 }[event.key];
    if (move) { const by = move * (line.to - line.from); line.from += by; line.to += by; zoom(1); }
    if (factor) zoom(factor);
  };
  at("closer").onclick = () => zoom(0.5);
  at("farther").onclick = () => zoom(2);
  at("whole").onclick = wholeLayer;
  at("same").onchange = wholeLayer;
  const keys = [["forward", "attention, forward"], ["linear", "linear layers"], ["backward", "attention, backward"],
    ["exposed", "waits for messages that are due"], ["late", "waits for the slowest rank"],
    ["near", "messages that reach it from its node"], ["far", "messages from other nodes"],
    ["bound", "the bound: perfect balance, nothing exposed"]];
  const told_keys = keys.filter(([shade]) => (shade !== "far" || PROBLEM.nodes > 1) &&
    (shade !== "bound" || PROBLEM.batches === 1));
  at("legend").replaceChildren(...told_keys.map(([shade, text]) => {
    const key = element("span", undefined, { class: "key" });
    key.append(element("i", "", { style: `background:var(--${shade})` }), text);
    return key;
  }));
  listeners.push((one) => {
    line.one = one;
    line.hover = null;
    const ranks = PROBLEM.nodes * PROBLEM.ranks_per_node;
    at("shown").textContent = "Messages above kernels are hidden behind them; above red they are waited for." +
      (one.ranks.length < ranks ? ` Of ${ranks} ranks ${one.ranks.length} are drawn, the busiest and the one that waits longest among them.` : "") +
      (one.detailed.length < one.ranks.length ? ` Tiles and documents are told for ranks ${one.detailed.join(", ")} alone.` : "");
    wholeLayer();
  });
  addEventListener("resize", drawTimeline);
}
