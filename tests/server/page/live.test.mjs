// Run by test_protocol.py: `node --test`.
import assert from "node:assert/strict";
import { test } from "node:test";
import { applyLive, describeRow, figures, gridOf, hueOf, kindOf, latencies, linePoints, ownerOf } from "../../../octavo/server/page/live.js";

const change = (fields) => ({ cores: { 0: { role: null, time: 1, step_s: 0.01, stats: {}, requests: {}, maps: [], decisions: [], ended: [], ...fields } } });

test("events add up to the state", () => {
  const cores = new Map();
  const stats = { num_blocks: 4, num_used_blocks: 1, num_generated_tokens: 0, num_prompt_tokens: 0, num_running: 1, num_waiting: 0 };
  applyLive(cores, change({ stats, requests: { 1: { request_id: "a", generated: 0 } }, maps: [{ tier: "device", group: 0, num_blocks: 4, runs: [[0, 2, 10], [3, 1, 1]] }] }));
  applyLive(cores, change({ time: 1.5, stats: { num_generated_tokens: 10 }, requests: { 1: { generated: 10 }, 2: { request_id: "b" } }, maps: [{ tier: "device", group: 0, num_blocks: 4, runs: [[1, 1, 0]] }] }));
  const core = cores.get("0");
  assert.deepEqual([...core.requests], [[1, { request_id: "a", generated: 10 }], [2, { request_id: "b" }]]);
  assert.deepEqual([...core.maps[0].cells], [10, 0, 0, 1]);
  assert.deepEqual([kindOf(10), ownerOf(10), kindOf(1)], ["in use", 1, "cached"]);
  assert.equal(core.samples.at(-1).generated, 20);
  applyLive(cores, change({ time: 2, requests: { 1: null }, maps: [{ tier: "device", group: 0, num_blocks: 0, runs: [] }] }));
  assert.deepEqual(core.maps, []);
  for (const [num_blocks, runs] of [[3, [[1, 2, 10]]], [0, []]]) applyLive(cores, change({ maps: [{ tier: "host", group: 0, num_blocks, runs }] }));
  assert.deepEqual([...core.maps[0].cells], [0, 0, 0], "a host that is unused for now stays in its place");
  assert.deepEqual([...core.requests.keys()], [2]);
  applyLive(cores, { cores: { 0: null } });
  assert.equal(cores.size, 0);
});

test("a decision that goes on is one entry", () => {
  const cores = new Map();
  const decision = { step: 3, last_step: 3, kind: "blocked", request_id: "a", because: "x" };
  applyLive(cores, change({ decisions: [decision] }));
  applyLive(cores, change({ decisions: [{ ...decision, last_step: 9, because: "y" }] }));
  assert.deepEqual(cores.get("0").decisions.map((each) => [each.last_step, each.because]), [[9, "y"]]);
});

test("latencies are those of requests that had both events", () => {
  const ended = [1, 2, 3, 4].map((at) => ({ events: [[0, "queued"], [at, "first token"], [9, "finished"]] }));
  assert.deepEqual(latencies([...ended, { events: [[0, "queued"], [1, "refused"]] }], "queued", "first token"), { count: 4, median: 3, high: 4 });
  assert.equal(latencies([], "queued", "first token").median, undefined);
});

test("figures of an engine that has done nothing are readable", () => {
  const names = figures({ stats: { num_running: 0 }, samples: [], ended: [] }).map(([, value]) => String(value));
  assert.ok(!names.some((value) => /NaN|Infinity/.test(value)), names.join());
  const stats = { num_running: 1, num_steps: 1234 };
  const shown = new Map(figures({ stats, step: 0.001, samples: [{ generated: 1680.6, prompt: 9.96 }], ended: [] }));
  assert.deepEqual(["Generated tokens/s", "Prompt tokens/s", "Steps"].map((name) => shown.get(name)), ["1,681", "10.0", "1,234"]);
});

test("rows, lines and grids", () => {
  assert.equal(describeRow({ start: 5, tokens: 1, samples: 1 }), "position 5, draws 1 token");
  assert.equal(describeRow({ start: 0, tokens: 4, samples: 0 }), "positions 0 to 3, a chunk of the prompt");
  assert.equal(linePoints([0, 2], 79, 20), "78.0,20.0 79.0,0.0");
  for (const [blocks, width] of [[8, 300], [16384, 1200], [200000, 350]]) {
    const cells = new Uint32Array(blocks);
    const free = gridOf({ tier: "device", cells }, width);
    assert.ok(free.rows * free.side <= 300, "a map of free blocks is not scrolled");
    assert.equal(gridOf({ tier: "host", cells }, width).rows, 1);
    cells[blocks - 1] = 1;
    const { side, columns, rows } = gridOf({ tier: "device", cells }, width);
    assert.ok(side >= 4 && columns * side <= width && columns * rows >= blocks);
  }
  assert.notEqual(hueOf(1), hueOf(2));
});
