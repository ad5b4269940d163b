// Functions that need no document: events, chunks, requests, parameters, formatting of numbers. Tested with node.

/** Splits a stream of server-sent events, cut anywhere, into the data of its events. */
export class EventReader {
  #rest = "";
  feed(text) {
    const events = (this.#rest + text).split("\n\n");
    this.#rest = events.pop();
    const dataOf = (event) => event.split("\n").filter((line) => line.startsWith("data:"));
    return events.map((event) => dataOf(event).map((line) => line.slice(5).trim()).join("\n")).filter(Boolean);
  }
}

export const emptyVersion = () => ({ text: "", reasoning: "", calls: [], tokens: [], finish: null });

function tokensOf(logprobs) {
  if (!logprobs) return [];
  const one = ({ token, logprob }) => ({ text: token, logprob });
  if (logprobs.content) return logprobs.content.map((each) => ({ ...one(each), top: each.top_logprobs.map(one) }));
  return logprobs.tokens.map((text, i) => {
    const top = Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([token, logprob]) => one({ token, logprob }));
    return { text, logprob: logprobs.token_logprobs[i], top: top.sort((a, b) => b.logprob - a.logprob) };
  });
}

/** Add a chunk of a stream, or a whole response, of chat or completions to the versions, one for each choice. */
export function applyChunk(versions, chunk) {
  for (const choice of chunk.choices ?? []) {
    const version = (versions[choice.index] ??= emptyVersion());
    const delta = choice.delta ?? choice.message ?? { content: choice.text };
    version.text += delta.content ?? "";
    version.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    for (const [place, piece] of (delta.tool_calls ?? []).entries()) {
      const call = (version.calls[piece.index ?? place] ??= { id: "", name: "", arguments: "" });
      call.id ||= piece.id ?? "";
      call.name ||= piece.function?.name ?? "";
      call.arguments += piece.function?.arguments ?? "";
    }
    version.tokens.push(...tokensOf(choice.logprobs));
    version.finish = choice.finish_reason ?? version.finish;
  }
}

/** Return the messages of a conversation: `turns` have a role and a text, or versions of which one is chosen. */
export function messagesOf(system, turns) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.role !== "assistant") {
      const { role, text, id, images = [] } = turn;
      const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
      const content = parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text;
      messages.push(id ? { role, content, tool_call_id: id } : { role, content });
      continue;
    }
    const { text, calls } = turn.versions[turn.chosen];
    const message = { role: "assistant", content: text };
    if (calls.length) {
      const asFunction = ({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } });
      message.tool_calls = calls.map(asFunction);
      message.content = text || null;
    }
    messages.push(message);
  }
  return messages;
}

const NUM_ALTERNATIVES = 8;

/** Return the path and the body of a request. `prefix`: text that the answer goes on from; then no grammar applies. */
export function requestOf({ isChat, model, system, turns, settings, showsTokens, prefix = "" }) {
  const body = { ...(model && { model }), ...settings, stream: true, stream_options: { include_usage: true } };
  if (prefix) for (const name of ["response_format", "structured_outputs", "tools", "tool_choice"]) delete body[name];
  if (isChat) {
    body.messages = messagesOf(system, turns);
    if (prefix) {
      body.messages.push({ role: "assistant", content: prefix });
      Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    }
    if (showsTokens) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES, return_tokens_as_token_ids: false });
    return { path: "v1/chat/completions", body };
  }
  body.prompt = turns.findLast((turn) => turn.role === "user").text + prefix;
  for (const name of ["tools", "tool_choice", "parallel_tool_calls"]) delete body[name];
  if (showsTokens) Object.assign(body, { logprobs: NUM_ALTERNATIVES, return_tokens_as_token_ids: false });
  return { path: "v1/completions", body };
}

/** Return a command line for a POSIX shell. The key is named by its variable and never written. */
export function curlOf(url, body, hasKey) {
  const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $OCTAVO_API_KEY"` : "";
  return `curl -N ${quoted(url)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body, null, 1))}`;
}

const OTHERS = new Set(["logprob_token_ids", "prompt_logprobs"]); // left out: the view "Tokens" sets log-probabilities
const FIRST = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop", "n"];

/** Return the fields of a request that have an input, the usual ones first: name, kind and help, from its schema. Those without a
 * description have none: the page sets them, or they change no text. */
export function parametersOf(schema) {
  const kindOf = (members) => {
    const kinds = members.map((each) => (each.type === "array" ? `${each.items?.type}s` : each.type));
    const known = ["number", "integer", "boolean", "strings", "integers", "string", "object"];
    return known.find((kind) => kinds.includes(kind));
  };
  const fields = Object.entries(schema.properties).flatMap(([name, property]) => {
    const outer = property.anyOf ?? [property];
    const kind = OTHERS.has(name) ? null : kindOf(outer.flatMap((each) => each.anyOf ?? [each]));
    const help = property.description ?? outer.find((each) => each.description)?.description ?? "";
    return kind && help ? [{ name, kind, help, values: outer.flatMap((each) => each.enum ?? []) }] : [];
  });
  const first = FIRST.flatMap((name) => fields.filter((field) => field.name === name));
  return [...first, ...fields.filter((field) => !first.includes(field))];
}

/** Return the value that a text stands for; undefined for an empty one. Throws an Error with a sentence. */
export function parameterValue(kind, text) {
  if (text.trim() === "") return undefined;
  const number = Number(text);
  if (kind === "integer" && !Number.isInteger(number)) throw new Error("must be a whole number");
  if (kind === "number" && !Number.isFinite(number)) throw new Error("must be a number");
  if (kind === "integer" || kind === "number") return number;
  if (kind === "boolean") return text === "true";
  if (kind === "string") return text;
  if (kind === "strings") return text.split("\n").map((line) => line.replaceAll("\\n", "\n"));
  if (kind === "integers") return text.split(/[\s,]+/).filter(Boolean).map((each) => parameterValue("integer", each));
  return jsonValue(text);
}

/** Return parsed JSON. Throws an Error with a sentence. */
export function jsonValue(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`not JSON: ${error.message}`);
  }
}

/** Return the fields of a request for a form that the output must have. Throws an Error with a sentence. */
export function formFields(kind, text) {
  if (kind === "json_object") return { response_format: { type: "json_object" } };
  if (!kind || text.trim() === "") return {};
  if (kind === "json") {
    return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: jsonValue(text) } } };
  }
  if (kind === "choice") return { structured_outputs: { choice: text.split("\n").filter(Boolean) } };
  return { structured_outputs: { [kind]: text } };
}

/** Return how strongly a token is shaded, from 0 (certain) to 1 (one in a thousand, or less). */
export const surprise = (logprob) => Math.min(1, Math.max(0, -(logprob ?? 0) / Math.log(1000)));

/** Return a probability as a text of three digits at most. */
export function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  if (share > 99.95) return "100%";
  return share >= 0.1 ? `${share.toFixed(share < 10 ? 2 : 1)}%` : "<0.1%";
}

export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  return seconds < 100 ? `${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

/** Return what is under a finished answer: the model where there are several, tokens, speed, time to the first token, tokens from the cache. The speed is the
 * engine's: chunks of a stream come together when the browser or the network is slower. */
export function summaryOf({ model, error, finish, usage, startedAt, firstAt, endedAt }) {
  if (endedAt == null) return "";
  const parts = model ? [model] : [];
  const count = usage?.completion_tokens;
  if (usage) parts.push(`${usage.prompt_tokens} prompt + ${count} output tokens`);
  if (usage?.prompt_tokens_details?.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} from the cache`);
  if (firstAt != null) parts.push(`first after ${duration((firstAt - startedAt) / 1000)}`);
  const speed = usage?.timings?.[0]?.predicted_per_second;
  if (speed) parts.push(`${speed.toFixed(1)} tokens/s`);
  return [...parts, finish ? `ended by ${finish}` : error ? "failed" : "stopped"].join(" · ");
}

/** Return why no request of an engine goes on, "" where requests do. */
export function heldBecause(isPaused, isSleeping) {
  if (isSleeping) return "The engine sleeps: requests wait until POST /wake_up.";
  return isPaused ? "Generation is paused: requests wait until POST /resume." : "";
}
