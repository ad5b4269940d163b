// The state of the engine, kept from the events of the live stream. Needs no document; tested with node.
import { duration } from "./protocol.js";

export const KINDS = ["free", "cached", "in use", "shared", "pinned", "held"];
const OWNER_SHIFT = 3;
const MOST_DECISIONS = 200;
const NUM_SAMPLES = 80;

export const kindOf = (cell) => KINDS[cell & ((1 << OWNER_SHIFT) - 1)];
export const ownerOf = (cell) => cell >>> OWNER_SHIFT;
/** Return the hue of a request: numbers that follow one another are far apart. */
export const hueOf = (number) => Math.round((number * 137.508) % 360);

const emptyCore = () => ({ stats: {}, requests: new Map(), rows: [], maps: [], decisions: [], ended: [], samples: [], at: 0 });

/** Apply an event of the stream to the cores, a Map by the number of the replica. */
export function applyLive(cores, event) {
  for (const [number, change] of Object.entries(event.cores)) {
    if (change === null) {
      cores.delete(number);
      continue;
    }
    if (!cores.has(number)) cores.set(number, emptyCore());
    const core = cores.get(number);
    const before = { ...core.stats, at: core.at };
    Object.assign(core.stats, change.stats);
    Object.assign(core, { role: change.role, step: change.step_s, at: change.time, rows: change.rows ?? core.rows });
    for (const [id, fields] of Object.entries(change.requests)) {
      if (fields === null) core.requests.delete(Number(id));
      else core.requests.set(Number(id), { ...core.requests.get(Number(id)), ...fields });
    }
    for (const map of change.maps) applyMap(core.maps, map);
    for (const entry of change.decisions) {
      const same = (other) => ["step", "kind", "request_id"].every((name) => other[name] === entry[name]);
      core.decisions = [...core.decisions.filter((other) => !same(other)), entry].slice(-MOST_DECISIONS);
    }
    core.ended = [...core.ended, ...change.ended].slice(-MOST_DECISIONS);
    if (before.at) addSample(core, before);
  }
}

function applyMap(maps, { tier, group, num_blocks: size, runs }) {
  let map = maps.find((each) => each.tier === tier && each.group === group);
  if (!map) maps.push((map = { tier, group, cells: new Uint32Array(size) }));
  if (size === 0 && tier === "host") return void map.cells.fill(0); // unused for now: the map stays, so that maps below do not move
  if (size === 0) maps.splice(maps.indexOf(map), 1);
  if (map.cells.length !== size) map.cells = new Uint32Array(size);
  for (const [first, count, cell] of runs) map.cells.fill(cell, first, first + count);
}

function addSample(core, before) {
  const { stats, at } = core;
  const rate = (name) => Math.max(0, stats[name] - before[name]) / Math.max(1e-3, at - before.at);
  const sample = { generated: rate("num_generated_tokens"), prompt: rate("num_prompt_tokens"), step: core.step * 1000 };
  sample.used = stats.num_blocks ? (100 * stats.num_used_blocks) / stats.num_blocks : 0;
  core.samples = [...core.samples, { ...sample, running: stats.num_running, waiting: stats.num_waiting }].slice(-NUM_SAMPLES);
}

const timeOf = (events, name) => events.find(([, event]) => event.startsWith(name))?.[0];

/** Return the median and the 90th percentile of a latency over the most recently finished requests, in seconds. */
export function latencies(ended, from, to) {
  const spans = ended.map(({ events }) => timeOf(events, to) - timeOf(events, from)).filter(Number.isFinite);
  spans.sort((a, b) => a - b);
  const at = (share) => spans[Math.min(spans.length - 1, Math.floor(share * spans.length))];
  return { count: spans.length, median: at(0.5), high: at(0.9) };
}

/** Return the figures of a core: what it is called, its value, and the name of the samples behind it. */
export function figures({ stats, step, samples, ended }) {
  const last = stats.num_running ? (samples.at(-1) ?? {}) : { generated: 0, prompt: 0 };
  const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)}%` : "–");
  const first = latencies(ended, "queued", "first token");
  const tokens = (value) => (value == null ? "–" : value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1));
  return [
    ["Running", stats.num_running, "running"],
    ["Waiting", stats.num_waiting, "waiting"],
    ["Swapped", stats.num_swapped],
    ["Generated tokens/s", tokens(last.generated), "generated"],
    ["Prompt tokens/s", tokens(last.prompt), "prompt"],
    ["Step", stats.num_steps ? duration(step) : "–", "step"],
    ["First token, median", duration(first.median)],
    ["First token, 90 %", duration(first.high)],
    ["KV blocks in use", share(stats.num_used_blocks, stats.num_blocks), "used"],
    ["Prefix hits", share(stats.num_cached_tokens, stats.num_queried_tokens)],
    ["Preemptions", stats.num_preemptions],
    ["Steps", stats.num_steps?.toLocaleString("en")],
  ];
}

/** Return what a row of a step does, in words. */
export function describeRow({ start, tokens, samples }) {
  const place = tokens === 1 ? `position ${start}` : `positions ${start} to ${start + tokens - 1}`;
  return `${place}, ${samples ? `draws ${samples} ${samples === 1 ? "token" : "tokens"}` : "a chunk of the prompt"}`;
}

/** Return the points of a line through the samples, the last one at the right end, from 0 to the largest value. */
export function linePoints(values, width, height) {
  const most = Math.max(...values, 1e-9);
  const x = (i) => width - ((values.length - 1 - i) * width) / (NUM_SAMPLES - 1);
  return values.map((value, i) => `${x(i).toFixed(1)},${(height - (value / most) * height).toFixed(1)}`).join(" ");
}

const MAP_HEIGHT = 300;

/** Return the side of a cell, and columns and rows for a map that fills a width: cells are large where blocks are few. Free blocks
 * behind the last one in use have cells as far as the map needs no scrolling; on the host, none. */
export function gridOf({ tier, cells }, width) {
  const side = Math.max(tier === "host" ? 8 : 4, Math.min(14, Math.floor(Math.sqrt((width * 260) / Math.max(1, cells.length)))));
  const columns = Math.max(1, Math.floor(width / side));
  const least = tier === "host" ? 1 : Math.floor(MAP_HEIGHT / side);
  const used = Math.ceil((cells.findLastIndex((cell) => cell !== 0) + 1) / columns);
  return { side, columns, rows: Math.min(Math.ceil(cells.length / columns), Math.max(least, used)) };
}
