// Run by test_protocol.py: `node --test`.
import assert from "node:assert/strict";
import { test } from "node:test";
import {
  applyChunk, curlOf, EventReader, formFields, heldBecause, messagesOf, parametersOf, parameterValue, percent, requestOf, summaryOf, surprise,
} from "../../../octavo/server/page/protocol.js";

const chat = (delta, more = {}) => ({ choices: [{ index: 0, delta, ...more }] });
const user = (text) => ({ role: "user", text });

test("a stream that is cut anywhere has the same events", () => {
  const stream = 'data: {"a": "ä"}\n\n: a comment\n\ndata: 1\ndata: 2\n\ndata: [DONE]\n\n';
  for (let size = 1; size < stream.length; size++) {
    const reader = new EventReader();
    const found = [];
    for (let i = 0; i < stream.length; i += size) found.push(...reader.feed(stream.slice(i, i + size)));
    assert.deepEqual(found, ['{"a": "ä"}', "1\n2", "[DONE]"]);
  }
});

test("chunks of chat add up to text, reasoning, calls and tokens of each choice", () => {
  const versions = [];
  applyChunk(versions, chat({ role: "assistant", content: "" }));
  applyChunk(versions, chat({ reasoning_content: "hm" }));
  applyChunk(versions, chat({ content: "Hi" }, { logprobs: { content: [{ token: "Hi", logprob: -1, top_logprobs: [{ token: "Ho", logprob: -0.5 }] }] } }));
  applyChunk(versions, chat({ tool_calls: [{ index: 0, id: "c1", function: { name: "f", arguments: '{"a"' } }] }));
  applyChunk(versions, chat({ tool_calls: [{ index: 0, function: { arguments: ":1}" } }] }));
  applyChunk(versions, { choices: [{ index: 1, delta: { content: "second" } }] });
  applyChunk(versions, chat({}, { finish_reason: "tool_calls" }));
  assert.deepEqual(versions[0], {
    text: "Hi", reasoning: "hm", finish: "tool_calls",
    calls: [{ id: "c1", name: "f", arguments: '{"a":1}' }],
    tokens: [{ text: "Hi", logprob: -1, top: [{ text: "Ho", logprob: -0.5 }] }],
  });
  assert.equal(versions[1].text, "second");
});

test("chunks of completions have the same tokens, the likeliest alternative first", () => {
  const versions = [];
  const logprobs = { tokens: ["a"], token_logprobs: [-2], top_logprobs: [{ a: -2, b: -1 }], text_offset: [0] };
  applyChunk(versions, { choices: [{ index: 0, text: "a", logprobs, finish_reason: "length" }] });
  assert.deepEqual(versions[0].tokens, [{ text: "a", logprob: -2, top: [{ text: "b", logprob: -1 }, { text: "a", logprob: -2 }] }]);
  assert.equal(versions[0].finish, "length");
});

test("a conversation has its chosen versions, its calls and their answers as messages", () => {
  const call = { id: "c1", name: "f", arguments: "{}" };
  const versions = [{ text: "no", calls: [] }, { text: "", calls: [call] }];
  const turns = [user("hello"), { role: "assistant", versions, chosen: 1 }, { role: "tool", id: "c1", text: "42" }];
  assert.deepEqual(messagesOf("be brief", turns), [
    { role: "system", content: "be brief" },
    { role: "user", content: "hello" },
    { role: "assistant", content: null, tool_calls: [{ id: "c1", type: "function", function: { name: "f", arguments: "{}" } }] },
    { role: "tool", content: "42", tool_call_id: "c1" },
  ]);
});

test("images stand before the text of their message", () => {
  const messages = messagesOf("", [{ ...user("what?"), images: ["data:a", "data:b"] }, { ...user("and?"), images: [] }, { ...user(""), images: ["data:c"] }]);
  const image = (url) => ({ type: "image_url", image_url: { url } });
  assert.deepEqual(messages, [
    { role: "user", content: [image("data:a"), image("data:b"), { type: "text", text: "what?" }] },
    { role: "user", content: "and?" },
    { role: "user", content: [image("data:c")] },
  ]);
});

test("a branch goes on from the text before it, without a form that would begin anew", () => {
  const settings = { temperature: 0, response_format: { type: "json_object" } };
  const parts = { model: "m", system: "", turns: [user("hi")], settings, showsTokens: true, prefix: "Hel" };
  const { path, body } = requestOf({ ...parts, isChat: true });
  assert.equal(path, "v1/chat/completions");
  assert.deepEqual(body.messages.at(-1), { role: "assistant", content: "Hel" });
  assert.ok(body.continue_final_message && !body.add_generation_prompt && !("response_format" in body));
  assert.equal(body.top_logprobs, 8);
  assert.equal(requestOf({ ...parts, isChat: false }).body.prompt, "hiHel");
  // a server may show tokens by their ids, of which no text is made
  for (const isChat of [true, false]) assert.equal(requestOf({ ...parts, isChat }).body.return_tokens_as_token_ids, false);
});

test("a curl command holds any text, and the key's variable alone", () => {
  const command = curlOf("http://x/v1", { prompt: "it's $HOME" }, true);
  assert.ok(command.includes(`it'\\''s $HOME`) && command.includes('"Authorization: Bearer $OCTAVO_API_KEY"'));
});

test("parameters come from the schema, the usual ones first", () => {
  const either = (kind, description) => ({ anyOf: [{ ...kind, description }, { type: "null" }] });
  const properties = {
    messages: { type: "array" }, session_id: { type: "string" }, min_tokens: either({ type: "integer" }, "fewest"), stop: either({ anyOf: [{ type: "array", items: { type: "string" } }, { type: "string" }] }, "ends"),
    logit_bias: either({ type: "object" }, "added"), temperature: either({ type: "number" }, "randomness"),
  };
  const found = parametersOf({ properties }).map(({ name, kind, help }) => [name, kind, help]);
  assert.deepEqual(found, [["temperature", "number", "randomness"], ["stop", "strings", "ends"], ["min_tokens", "integer", "fewest"], ["logit_bias", "object", "added"]]);
});

test("values are read by kind, and what is wrong is said", () => {
  assert.deepEqual([parameterValue("number", "0.5"), parameterValue("integer", " "), parameterValue("boolean", "false")], [0.5, undefined, false]);
  assert.deepEqual(parameterValue("strings", "a\nb\\nc"), ["a", "b\nc"]);
  assert.deepEqual(parameterValue("integers", "1, 2 3"), [1, 2, 3]);
  assert.throws(() => parameterValue("integer", "1.5"), /whole number/);
  assert.throws(() => formFields("json", "{"), /not JSON/);
  assert.deepEqual(formFields("choice", "a\nb\n"), { structured_outputs: { choice: ["a", "b"] } });
  assert.deepEqual(formFields("", "x"), {});
});

test("numbers are readable", () => {
  assert.deepEqual([surprise(0), surprise(-1e9), surprise(null)], [0, 1, 0]);
  assert.deepEqual([percent(0), percent(Math.log(0.5)), percent(-20)], ["100%", "50.0%", "<0.1%"]);
  const timings = [{ predicted_per_second: 10 }];
  const usage = { prompt_tokens: 4, completion_tokens: 11, prompt_tokens_details: { cached_tokens: 2 }, timings };
  const version = { finish: "stop", usage, startedAt: 0, firstAt: 500, endedAt: 501 };
  assert.equal(summaryOf(version), "4 prompt + 11 output tokens · 2 from the cache · first after 500 ms · 10.0 tokens/s · ended by stop");
  assert.equal(summaryOf({ startedAt: 0 }), "");
});

test("a pause and a sleep are named with what ends them", () => {
  assert.equal(heldBecause(0, 0), "");
  assert.match(heldBecause(1, 0), /paused.*POST \/resume/);
  assert.match(heldBecause(1, 1), /sleeps.*POST \/wake_up/);
});
