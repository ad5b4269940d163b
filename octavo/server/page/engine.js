// The live view of the engine: figures, block maps, the last step, requests with their timelines, decisions.
import { events } from "./api.js";
import { button, el, keepFocus, onceAFrame } from "./dom.js";
import { applyLive, describeRow, figures, gridOf, hueOf, kindOf, KINDS, linePoints, ownerOf } from "./live.js";
import { duration, heldBecause } from "./protocol.js";

const RETRY_MS = 2000;
const SVG = "http://www.w3.org/2000/svg";
const colour = (number) => `oklch(0.68 0.14 ${hueOf(number)})`;
const swatch = (number) => {
  const node = el("i", { class: "swatch", "aria-hidden": "true" });
  node.style.background = colour(number);
  return node;
};
const short = (id) => id.replace(/^(chatcmpl|cmpl)-/, "").replace(/-\d+-[0-9a-f]{12}$/, "").slice(0, 14);
const readable = (because) => because.replace(/\S+-\d+-[0-9a-f]{12}\b/g, short);

/** Start the view. Returns `show(isShown)`: the stream is open only while it is shown and the tab is visible. */
export function startEngine(panel) {
  let cores = new Map();
  let abort = null;
  let isShown = false;
  let chosen = null; // [replica, request id]
  let only = ""; // the replica that is shown alone
  let hovered = { map: "", place: 0 }; // the block below the pointer
  const note = el("p", { class: "note", role: "status" }, "Connecting…");
  const views = el("div", { class: "cores" });
  panel.replaceChildren(el("h2", { class: "hidden" }, "Engine"), note, views);
  let isPressed = false; // while pressed or selected, elements must not be replaced
  const draw = onceAFrame(() => {
    if (isPressed || (getSelection().type === "Range" && views.contains(getSelection().anchorNode))) return;
    note.hidden = cores.size > 0;
    const several = cores.size > 1 && chooser();
    const shown = [...cores].filter(([number]) => !cores.has(only) || number === only);
    keepScrolled(views, () => views.replaceChildren(...KINDS.map((_, place) => el("i", { class: `probe k${place}`, hidden: true })), ...(several ? [several] : []), ...shown.map(([number, core]) => coreNode(number, core))));
    for (const [number, core] of shown) core.maps.forEach((map, i) => drawMap(views.querySelector(`[data-map="${number}-${i}"]`), map, core));
  });

  function chooser() {
    const name = (number) => `Replica ${number}${cores.get(number).role ? ` (${cores.get(number).role})` : ""}`;
    const choice = (value, text) => button(text, () => ((only = value), draw()), { "aria-pressed": String(only === value), "data-key": `only-${value}` });
    return el("div", { class: "row" }, choice("", "All"), [...cores.keys()].map((number) => choice(number, name(number))));
  }

  function coreNode(number, core) {
    const title = el("h3", { class: cores.size > 1 ? "" : "hidden" }, `Replica ${number}${core.role ? `, ${core.role}` : ""}`);
    const side = el("div", { class: "column" }, stepNode(core), decisionsNode(number, core));
    const held = heldBecause(core.stats.num_paused, core.stats.num_sleeping);
    return el("article", { class: "core" }, title, held ? el("p", { class: "paused" }, held) : null, figuresNode(core), core.maps.map((map, i) => mapNode(number, map, i)), el("div", { class: "columns" }, el("div", { class: "column" }, requestsNode(number, core)), side));
  }

  function figuresNode(core) {
    const line = (name) => {
      const svg = document.createElementNS(SVG, "svg");
      svg.setAttribute("viewBox", "0 0 100 20");
      svg.setAttribute("preserveAspectRatio", "none");
      svg.setAttribute("aria-hidden", "true");
      const points = document.createElementNS(SVG, "polyline");
      points.setAttribute("points", linePoints(core.samples.map((sample) => sample[name]), 100, 20));
      svg.append(points);
      return svg;
    };
    return el("dl", { class: "figures" }, figures(core).map(([name, value, samples]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value ?? "–")), samples ? line(samples) : null)));
  }

  function mapNode(number, map, i) {
    const counts = new Array(KINDS.length).fill(0);
    for (const cell of map.cells) counts[KINDS.indexOf(kindOf(cell))]++;
    const legend = KINDS.map((kind, place) => (counts[place] || place < 3) && el("li", {}, el("i", { class: `swatch k${place}` }), `${kind} ${counts[place].toLocaleString("en")}`));
    const title = `KV blocks${map.tier === "host" ? " on the host" : ""}${map.group ? `, group ${map.group}` : ""}`;
    const key = `${number}-${i}`;
    const about = el("span", { class: "about-cell" });
    const tell = () => {
      const [{ place }, cell] = [hovered, map.cells[hovered.place]];
      const owner = cores.get(number)?.requests.get(ownerOf(cell ?? 0));
      const isOver = hovered.map === key && cell !== undefined;
      about.textContent = isOver ? `block ${place + 1}: ${kindOf(cell)}${owner ? `, ${short(owner.request_id)}` : ""}` : "";
    };
    tell();
    const canvas = el("canvas", { "data-map": key, role: "img", "aria-label": `${title}: ${KINDS.map((kind, place) => `${counts[place]} ${kind}`).join(", ")}` });
    const cellAt = (event) => {
      const { side, columns } = canvas.grid;
      const box = canvas.getBoundingClientRect();
      return Math.floor((event.clientY - box.top) / side) * columns + Math.floor((event.clientX - box.left) / side);
    };
    canvas.addEventListener("mousemove", (event) => tell((hovered = { map: key, place: cellAt(event) })));
    canvas.addEventListener("mouseleave", () => tell((hovered = { map: "", place: 0 })));
    canvas.addEventListener("click", (event) => {
      const owner = cores.get(number)?.requests.get(ownerOf(map.cells[cellAt(event)] ?? 0));
      if (owner) choose(number, owner.request_id);
    });
    return el("section", { class: "map" }, el("div", { class: "head" }, el("h4", {}, title), about, el("ul", { class: "legend" }, legend)), el("div", { class: "scroll", tabindex: 0 }, canvas));
  }

  function drawMap(canvas, map, core) {
    const plain = KINDS.map((_, place) => getComputedStyle(views.querySelector(`.probe.k${place}`)).backgroundColor);
    const { side, columns, rows } = (canvas.grid = gridOf(map, canvas.parentNode.clientWidth));
    const scale = devicePixelRatio;
    canvas.width = columns * side * scale;
    canvas.height = rows * side * scale;
    canvas.style.width = `${columns * side}px`;
    canvas.style.height = `${rows * side}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const isChosenOpen = [...core.requests.values()].some((each) => each.request_id === chosen?.[1]);
    map.cells.subarray(0, rows * columns).forEach((cell, i) => {
      const [kind, owner] = [KINDS.indexOf(kindOf(cell)), ownerOf(cell)];
      const [x, y, inner] = [(i % columns) * side, Math.floor(i / columns) * side, side - 1];
      const isDim = isChosenOpen && owner && core.requests.get(owner)?.request_id !== chosen[1];
      context.globalAlpha = isDim ? 0.3 : 1;
      context.fillStyle = owner ? colour(owner) : plain[kind];
      context.fillRect(x, y, inner, inner);
      if (kind !== 3 || !owner) return;
      context.fillStyle = plain[3]; // a corner marks blocks that several requests use
      context.fillRect(x, y, inner / 2, inner / 2);
    });
  }

  function stepNode({ rows, requests }) {
    const total = rows.reduce((sum, row) => sum + row.tokens, 0);
    const pieces = rows.map((row) => {
      const id = requests.get(row.request)?.request_id;
      const piece = el("i", { title: `${id ? short(id) : "ended"}: ${describeRow(row)}` });
      piece.style.flexGrow = row.tokens;
      piece.style.background = row.request ? colour(row.request) : "var(--line)";
      return piece;
    });
    const text = rows.length ? `${rows.length} ${rows.length === 1 ? "row" : "rows"}, ${total} ${total === 1 ? "token" : "tokens"}` : "no step yet";
    return el("section", {}, el("div", { class: "head" }, el("h4", {}, "Last step"), el("span", { class: "count" }, text)), el("div", { class: "step", role: "img", "aria-label": `The last step: ${text}` }, pieces));
  }

  function requestsNode(number, core) {
    const heads = ["Request", "State", "Prompt", "Cached", "Generated", "Blocks", "Time"];
    const open = [...core.requests].map(([key, request]) => requestRow(number, core, request, swatch(key), request.state, request));
    const found = core.ended.filter((each) => each.request_id === chosen?.[1]);
    const last = [...core.ended.slice(-12).filter((each) => each !== found[0]), ...found].reverse(); // the chosen one first
    const ended = last.map((each) => {
      const request = { ...each, prompt: each.num_prompt_tokens, cached: each.num_cached_tokens, generated: each.num_generated_tokens, blocks: "" };
      return requestRow(number, core, request, el("i", { class: "swatch k0" }), each.events.at(-1)[1], each);
    });
    const body = [...open, ...ended].flat();
    const table = el("table", {}, el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", { scope: "col", class: i > 1 ? "number" : "" }, head)))), el("tbody", {}, body));
    const about = el("span", { class: "count" }, `${core.requests.size} open; finished ones below`);
    return el("section", {}, el("div", { class: "head" }, el("h4", {}, "Requests"), about), body.length ? el("div", { class: "scroll" }, table) : el("p", { class: "none" }, "No request yet."));
  }

  function requestRow(number, core, request, mark, state, { events }) {
    const isChosen = chosen?.[0] === number && chosen[1] === request.request_id;
    const name = button(short(request.request_id), () => choose(number, request.request_id), { "aria-expanded": String(isChosen), "data-key": `${number}-${request.request_id}`, title: request.request_id });
    const numbers = [request.prompt, request.cached, request.generated, request.blocks];
    const end = core.requests.size && events === request.events && request.state ? core.at : events.at(-1)[0];
    const cells = [...numbers.map(String), duration(Math.max(0, end - events[0][0]))];
    const row = el("tr", { class: isChosen ? "chosen" : "" }, el("td", {}, mark, name), el("td", {}, state), cells.map((text) => el("td", { class: "number" }, text)));
    if (!isChosen) return [row];
    const why = core.decisions.filter((each) => each.request_id === request.request_id && each.because);
    const all = [...events, ...why.map((each) => [each.time, `${each.kind}: ${readable(each.because)}`])].sort((a, b) => a[0] - b[0]);
    const items = all.map(([at, event], i) => el("li", {}, el("span", { class: "when" }, i ? `+${duration(at - events[0][0])}` : "0"), el("span", {}, event)));
    return [row, el("tr", { class: "timeline" }, el("td", { colspan: 7 }, el("ol", { "aria-label": `Timeline of ${request.request_id}` }, items)))];
  }

  function decisionsNode(number, core) {
    const items = core.decisions.slice(-60).reverse().map((each) => {
      const steps = each.last_step > each.step ? ` for ${each.last_step - each.step + 1} steps` : "";
      const name = button(short(each.request_id), () => choose(number, each.request_id), { "data-key": `d${number}-${each.step}-${each.kind}-${each.request_id}` });
      return el("li", {}, el("span", { class: "when" }, `${duration(Math.max(0, core.at - each.time))} ago`), el("span", {}, name, el("b", {}, each.kind.replace("_", " ")), `${steps}${each.because ? `: ${readable(each.because)}` : ""}`));
    });
    return el("section", {}, el("div", { class: "head" }, el("h4", {}, "Decisions")), items.length ? el("ol", { class: "decisions" }, items) : el("p", { class: "none" }, "No decision yet."));
  }

  function choose(number, id) {
    chosen = chosen?.[1] === id ? null : [number, id];
    draw();
  }

  async function watch() {
    if (abort) return;
    const own = (abort = new AbortController());
    while (abort === own) {
      try {
        cores = new Map();
        for await (const event of events("live", { signal: own.signal, isEndless: true })) {
          applyLive(cores, event);
          draw();
        }
        note.textContent = "The server closed the stream; reconnecting…";
      } catch (error) {
        if (error.name === "AbortError") return;
        note.textContent = error.status ? `${error.message}` : "The server does not respond; trying again…";
        cores = new Map();
        draw();
        if ([401, 403].includes(error.status)) return void (abort = null);
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  const update = () => {
    if (isShown && !document.hidden) return void watch();
    abort?.abort();
    abort = null;
  };
  document.addEventListener("visibilitychange", update);
  views.addEventListener("pointerdown", () => (isPressed = true));
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => draw((isPressed = false)));
  addEventListener("resize", draw);
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !isShown || !chosen) return;
    chosen = null;
    draw();
  });
  return (shown) => {
    isShown = shown;
    update();
  };
}

/** Run `change`, which makes elements anew, and keep the focus, and how far lists are scrolled. */
function keepScrolled(root, change) {
  const scrolled = [...root.querySelectorAll(".decisions, .scroll")].map((node) => [node.scrollTop, node.scrollLeft]);
  keepFocus(root, change);
  [...root.querySelectorAll(".decisions, .scroll")].forEach((node, i) => ([node.scrollTop, node.scrollLeft] = scrolled[i] ?? [0, 0]));
}
