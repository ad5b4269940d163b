// Conversations and completions: the log, the composer, and running requests.
import { answerView } from "./answer.js";
import { askJson, events, keyOf, urlOf } from "./api.js";
import { button, byId, el, keepFocus, onceAFrame } from "./dom.js";
import { pictures, promptOf, promptView, startImages } from "./images.js";
import { applyChunk, curlOf, emptyVersion, heldBecause, requestOf } from "./protocol.js";
import { startTokenCard } from "./tokens.js";

/** Return the property by which a button of a turn keeps the focus when the log is made anew. */
const keyed = (name, index) => ({ "data-key": `${name}-${index}` });
const KEPT = "octavo-conversations-1"; // change the number when the fields of turns change
const SHOWS_TOKENS = "octavo-shows-tokens";
const HELD_MS = 1000; // without a token for so long, the page asks (again) whether the engine is paused
const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

/** Return the conversations of this tab, which outlive a reload of the page. */
function keptConversations() {
  const kept = JSON.parse(sessionStorage.getItem(KEPT)) ?? { chat: [], completion: [] };
  const versions = Object.values(kept).flat().flatMap((turn) => turn.versions ?? []);
  for (const version of versions) version.endedAt ??= 0; // the reload has stopped this answer
  addEventListener("pagehide", () => {
    sessionStorage.removeItem(KEPT); // if the new state does not fit, no older one is restored
    sessionStorage.setItem(KEPT, JSON.stringify(kept));
  });
  return kept;
}

/** Return why a request waits where no engine core computes, else "". */
async function whyHeld() {
  const { engines } = await askJson("health").catch(() => ({ engines: [] }));
  const isHeld = engines.length > 0 && engines.every((each) => each.is_paused || each.is_sleeping);
  return isHeld ? heldBecause(true, engines.some((each) => each.is_sleeping)) : "";
}

/** Start the view. `settings` is what makeSettings returns, `modelOf` returns the chosen model. */
export function startPlayground(settings, modelOf) {
  const conversations = keptConversations();
  let mode = "chat";
  let running = null;
  const [log, prompt, status] = [byId("log"), byId("prompt"), byId("status")];
  const turns = () => conversations[mode];
  const say = (text, isWrong = false) => {
    status.textContent = text;
    status.classList.toggle("wrong", isWrong);
  };

  const images = startImages(say);

  // ---- rendering ----

  const views = new WeakMap(); // the element of each turn, with its `update()`
  const answers = new WeakMap(); // the typed answer to each call
  let removal = null; // the element that undoes the last removal

  function makeView(turn, index) {
    const isModel = turn.role === "assistant";
    const parts = { isRunning: () => running?.turn === turn, branch: (i, text) => branch(index, i, text), formOf: (call) => formOf(call, turn, index), copy: mode === "chat" && copy };
    const { node: body, update = () => {} } = isModel ? answerView(turn, parts) : { node: messageNode(turn) };
    const actions = isModel ? modelActions(turn, index) : [button("Edit", () => edit(turn, index, body), keyed("edit", index))];
    const name = mode === "completion" ? (isModel ? "Continuation" : "Prompt") : NAMES[turn.role];
    const head = el("div", { class: "head" }, el("h3", {}, name), el("div", { class: "actions" }, actions));
    return { node: el("li", { class: `turn ${turn.role}` }, head, body), update };
  }

  function messageNode(turn) {
    const showsPrompt = turn.prompt && byId("show-tokens").checked;
    const text = showsPrompt ? promptView(turn.prompt) : turn.text !== "" && el("div", { class: "text" }, turn.text);
    return el("div", { class: "body" }, turn.images?.length ? pictures(turn.images) : null, text);
  }

  function modelActions(turn, index) {
    const choose = (step) => {
      turn.chosen = (turn.chosen + step + turn.versions.length) % turn.versions.length;
      render(turn);
    };
    const several = turn.versions.length > 1 && [
      button("‹", () => choose(-1), { "aria-label": "previous version", ...keyed("before", index) }),
      el("span", { class: "count" }, `${turn.chosen + 1}/${turn.versions.length}`),
      button("›", () => choose(1), { "aria-label": "next version", ...keyed("next", index) }),
    ];
    const use = () => {
      prompt.value = `${turns()[index - 1].text}${turn.versions[turn.chosen].text}`;
      prompt.focus();
    };
    return [
      ...(several || []),
      mode === "completion" ? button("Use as prompt", use) : null,
      button("Copy", () => copy(turn.versions[turn.chosen].text, "the text"), keyed("copy", index)),
      button("Regenerate", () => run(index), keyed("again", index)),
    ];
  }

  /** Return the form for the answer of a call, or null for a call that is answered or that other turns follow. */
  function formOf(call, turn, index) {
    const after = turns().slice(index + 1);
    const isAnswered = ({ id }) => after.some((each) => each.id === id);
    if (isAnswered(call) || after.some((each) => each.role !== "tool")) return null;
    const properties = { "aria-label": `Result of ${call.name}`, placeholder: "result of the tool", "data-key": `answer-${call.id}` };
    const answer = el("textarea", { rows: 2, dir: "auto", value: answers.get(call) ?? "", ...properties });
    answer.oninput = () => answers.set(call, answer.value);
    const send = () => {
      after.push({ role: "tool", id: call.id, text: answer.value });
      turns().push(after.at(-1));
      if (turn.versions[turn.chosen].calls.every(isAnswered)) run(turns().length);
      else render();
    };
    return el("div", { class: "row" }, answer, button("Send result", send));
  }

  /** Show the turns. Elements stay, with focus and selection, but for those of turns that have `changed` or have calls. */
  function render(...changed) {
    const isAtEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
    const withCalls = turns().filter((turn) => turn.versions?.[turn.chosen].calls.length);
    for (const turn of [...changed, ...withCalls]) views.delete(turn);
    const nodes = turns().map((turn, index) => {
      if (!views.has(turn)) views.set(turn, makeView(turn, index));
      views.get(turn).update();
      return views.get(turn).node;
    });
    if (!nodes.length) nodes.push(el("li", { class: "empty" }, mode === "chat" ? "Write a message to begin." : "Write a text to continue."));
    if (removal) nodes.push(removal);
    const stay = new Set(nodes);
    keepFocus(log, () => {
      for (const node of [...log.children]) if (!stay.has(node)) node.remove();
      nodes.forEach((node, i) => log.children[i] === node || log.insertBefore(node, log.children[i] ?? null));
    });
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  /** Show what has come since in the turn that runs. */
  function renderRunning() {
    if (running?.mode !== mode) return;
    const isAtEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
    views.get(running.turn)?.update();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  // ---- actions ----

  /** Cut the conversation to a number of turns, and offer to take that back. */
  function cut(length) {
    const list = turns();
    const before = list.map((turn) => ({ ...turn }));
    const undo = () => {
      stop();
      removal = null;
      list.splice(0, Infinity, ...before);
      render();
      prompt.focus();
    };
    const count = list.length - length;
    list.length = length;
    removal = count ? el("li", { class: "removal" }, `${count} ${count === 1 ? "turn was" : "turns were"} removed. `, button("Undo", undo)) : null;
  }

  function edit(turn, index, body) {
    const text = el("textarea", { rows: Math.min(12, turn.text.split("\n").length + 1), value: turn.text, "aria-label": "Message", dir: "auto" });
    const save = () => {
      cut(index);
      turns().push({ ...turn, text: text.value, prompt: null });
      run(index + 1);
    };
    const cancel = () => {
      render(turn);
      log.querySelector(`[data-key="edit-${index}"]`)?.focus();
    };
    text.onkeydown = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation(); // Escape must not stop an answer here
        cancel();
      }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    };
    body.replaceChildren(text, el("div", { class: "row" }, button("Send again", save, { class: "primary" }), button("Cancel", cancel)));
    text.focus();
  }

  function branch(index, at, text) {
    const turn = turns()[index];
    const { tokens } = turn.versions[turn.chosen];
    const logprob = tokens[at].top.find((each) => each.text === text).logprob;
    run(index, [...tokens.slice(0, at), { ...tokens[at], text, logprob }]);
  }

  function requestAt(index, prefix = "") {
    const values = settings.read();
    if (values === null) return null;
    const parts = { model: modelOf(), system: settings.system, turns: turns().slice(0, index), settings: values, prefix };
    return requestOf({ ...parts, isChat: mode === "chat", showsTokens: byId("show-tokens").checked });
  }

  /** Generate the turn at `index`: a new one, or a new version of it; with `tokens`, one that goes on from these. */
  async function run(index, tokens = []) {
    stop();
    const prefix = tokens.map((token) => token.text).join("");
    const request = requestAt(index, prefix);
    if (!request) return;
    const turn = (turns()[index] ??= { role: "assistant", versions: [], chosen: 0 });
    if (turns().length > index + 1) cut(index + 1);
    const asked = turns()[index - 1];
    const model = byId("model").length > 1 ? modelOf() : "";
    const first = { ...emptyVersion(), model, text: prefix, tokens, startedAt: performance.now() };
    const versions = [first];
    turn.chosen = turn.versions.push(first) - 1;
    const own = (running = { abort: new AbortController(), turn, mode });
    setRunning(true);
    render(turn);
    const draw = onceAFrame(renderRunning);
    const asking = setInterval(async () => {
      if (first.firstAt != null) return clearInterval(asking);
      first.held = await whyHeld();
      draw();
    }, HELD_MS);
    try {
      const body = { ...request.body, return_timings: true };
      for await (const chunk of events(request.path, { body, signal: own.abort.signal })) {
        applyChunk(versions, chunk);
        if (chunk.usage) first.usage = chunk.usage;
        if (chunk.choices?.length) first.firstAt ??= performance.now();
        draw();
      }
      say("");
    } catch (error) {
      const isStopped = error.name === "AbortError";
      if (!isStopped) {
        first.error = error.message; // shown there alone: a long one below the composer would push the answer away
        settings.fail(error);
        say("the request failed", true);
      } else if (!running) say("stopped");
    }
    clearInterval(asking);
    for (const version of versions) Object.assign(version, { model, endedAt: performance.now() });
    byId("announcement").textContent = `${NAMES.assistant}: ${first.text}`;
    turn.versions.push(...versions.slice(1));
    if (running === own) setRunning(false);
    if (versions.length > 1) views.delete(turn);
    render();
    if (first.error || !asked?.images?.length || !byId("show-tokens").checked) return;
    try {
      asked.prompt = await promptOf(request.body);
      render(asked);
    } catch (error) {
      say(error.message, true);
    }
  }

  function stop() {
    running?.abort.abort();
    if (running) setRunning(false);
  }

  function setRunning(isOn) {
    if (!isOn) running = null;
    const [shown, gone] = isOn ? [byId("stop"), byId("send")] : [byId("send"), byId("stop")];
    const hasFocus = document.activeElement === gone;
    shown.hidden = false;
    gone.hidden = true;
    if (hasFocus) shown.focus();
    if (!isOn) return;
    say("");
    byId("announcement").textContent = "";
  }

  async function copy(text, what) {
    try {
      await navigator.clipboard.writeText(text);
      say(`copied ${what}`);
    } catch {
      say("the browser does not allow copying", true);
    }
  }

  function exportJson() {
    const content = JSON.stringify({ mode, model: modelOf(), system: settings.system, settings: settings.read(), turns: turns() }, null, 1);
    const link = el("a", { href: URL.createObjectURL(new Blob([content], { type: "application/json" })), download: `octavo-${mode}.json` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    say("saved as JSON");
  }

  function exportCurl() {
    const last = turns().findLastIndex((turn) => turn.role === "assistant");
    const request = requestAt(last < 0 ? turns().length : last);
    if (request && (mode === "chat" || turns().length)) copy(curlOf(urlOf(request.path), request.body, keyOf() !== ""), "the curl command");
  }

  // ---- start ----

  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return say("an answer is being generated; Esc stops it", true);
    if (!(prompt.value.trim() || images.count()) || settings.read() === null) return;
    cut(mode === "completion" ? 0 : turns().length);
    turns().push({ role: "user", text: prompt.value, images: images.take() });
    prompt.value = "";
    run(turns().length);
  });
  prompt.addEventListener("keydown", (event) => {
    const sends = event.key === "Enter" && !event.isComposing && (mode === "chat" ? !event.shiftKey : event.ctrlKey || event.metaKey);
    if (!sends) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  });
  addEventListener("keydown", (event) => event.key === "Escape" && byId("token-card").hidden && !byId("key-dialog").open && stop());
  byId("stop").onclick = stop;
  byId("show-tokens").checked = sessionStorage.getItem(SHOWS_TOKENS) === "true"; // what the browser restores may differ
  byId("show-tokens").onchange = () => {
    sessionStorage.setItem(SHOWS_TOKENS, byId("show-tokens").checked);
    render(...turns().filter((turn) => turn.versions || turn.prompt));
    const isLate = byId("show-tokens").checked && turns().some((turn) => turn.versions && !turn.versions[turn.chosen].tokens.length);
    say(isLate ? "tokens are shown from the next answer on" : "");
  };
  byId("export-json").onclick = exportJson;
  byId("export-curl").onclick = exportCurl;
  byId("clear").onclick = () => {
    stop();
    cut(0);
    render();
    prompt.focus();
  };
  startTokenCard();
  let readsImages = false; // until the models are known
  return {
    allowImages(isAllowed) {
      readsImages = isAllowed;
      images.allow(mode === "chat" && readsImages);
    },
    setMode(name) {
      if (name !== mode) {
        removal = null;
        if (!running) say(""); // it was about the other view
      }
      mode = name;
      images.allow(mode === "chat" && readsImages);
      byId("prompt-label").textContent = mode === "chat" ? "Message" : "Text to continue";
      prompt.placeholder = mode === "chat" ? "Write a message (Enter sends, Shift+Enter is a new line)" : "Text to continue (Ctrl+Enter sends)";
      render();
    },
  };
}
