// Conversations and completions: the log, the composer, and what runs.
import { events, keyOf, urlOf } from "./api.js";
import { button, byId, el, keepFocus, onceAFrame } from "./dom.js";
import { pictures, promptOf, promptView, startImages } from "./images.js";
import { applyChunk, curlOf, emptyVersion, requestOf, summaryOf } from "./protocol.js";
import { startTokenCard, tokenView } from "./tokens.js";

/** Return the property by which a button of a turn keeps the focus when the log is made anew. */
const keyed = (name, index) => ({ "data-key": `${name}-${index}` });
const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

/** Start the view. `settings` is what makeSettings returns, `modelOf` returns the chosen model. */
export function startPlayground(settings, modelOf) {
  const conversations = { chat: [], completion: [] };
  let mode = "chat";
  let running = null;
  const [log, prompt, status] = [byId("log"), byId("prompt"), byId("status")];
  const turns = () => conversations[mode];
  const say = (text, isWrong = false) => {
    status.textContent = text;
    status.classList.toggle("wrong", isWrong);
  };

  const images = startImages(say);

  // ---- what is shown ----

  function nodeOf(turn, index) {
    const body = el("div", { class: "body" });
    const isModel = turn.role === "assistant";
    const actions = isModel ? modelActions(turn, index) : [button("Edit", () => edit(turn, index, body), keyed("edit", index))];
    const name = mode === "completion" ? (isModel ? "Continuation" : "Prompt") : NAMES[turn.role];
    const head = el("div", { class: "head" }, el("h3", {}, name), el("div", { class: "actions" }, actions));
    if (isModel) body.append(...versionNodes(turn, index));
    else {
      if (turn.images?.length) body.append(pictures(turn.images));
      const showsPrompt = turn.prompt && byId("show-tokens").checked;
      body.append(showsPrompt ? promptView(turn.prompt) : el("div", { class: "text" }, turn.text));
    }
    return el("li", { class: `turn ${turn.role}` }, head, body);
  }

  function modelActions(turn, index) {
    const choose = (step) => {
      turn.chosen = (turn.chosen + step + turn.versions.length) % turn.versions.length;
      render();
    };
    const several = turn.versions.length > 1 && [
      button("‹", () => choose(-1), { "aria-label": "the version before", ...keyed("before", index) }),
      el("span", { class: "count" }, `${turn.chosen + 1}/${turn.versions.length}`),
      button("›", () => choose(1), { "aria-label": "the next version", ...keyed("next", index) }),
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

  function versionNodes(turn, index) {
    const version = turn.versions[turn.chosen];
    const nodes = [];
    if (version.reasoning) {
      const fold = el("details", { class: "reasoning", open: turn.showsReasoning }, el("summary", {}, "Reasoning"), el("div", { class: "text" }, version.reasoning));
      fold.addEventListener("toggle", () => (turn.showsReasoning = fold.open));
      nodes.push(fold);
    }
    const showsTokens = byId("show-tokens").checked && version.tokens.length;
    if (showsTokens) nodes.push(tokenView(version.tokens, (i, text) => branch(index, i, text)));
    else if (version.text || !version.calls.length) nodes.push(el("div", { class: "text" }, version.text));
    nodes.push(...version.calls.map((call) => callNode(call, index)));
    if (version.error) nodes.push(el("p", { class: "wrong", role: "alert" }, version.error));
    const isWaiting = running?.index === index && version.endedAt == null && version.firstAt == null;
    nodes.push(isWaiting ? el("p", { class: "waiting" }, "waiting for the first token…") : el("p", { class: "summary" }, summaryOf(version)));
    return nodes;
  }

  function callNode(call, index) {
    let shown = call.arguments;
    try {
      shown = JSON.stringify(JSON.parse(call.arguments), null, 1);
    } catch {
      // a call that is not complete yet is shown as it is
    }
    const isAnswered = turns().some((turn) => turn.role === "tool" && turn.id === call.id);
    const answer = el("textarea", { rows: 2, "aria-label": `Answer of ${call.name}`, placeholder: "what the tool returns" });
    const send = () => {
      turns().splice(index + 1 + turns().slice(index + 1).filter((turn) => turn.role === "tool").length, 0, { role: "tool", id: call.id, text: answer.value });
      const { calls } = turns()[index].versions[turns()[index].chosen];
      const isLast = calls.every((each) => turns().some((turn) => turn.id === each.id && turn.role === "tool"));
      if (isLast) run(turns().length);
      else render();
    };
    const form = !running && !isAnswered && el("div", { class: "row" }, answer, button("Answer", send));
    return el("div", { class: "call" }, el("h4", {}, `calls ${call.name}`), el("pre", {}, shown), form);
  }

  function render() {
    const isAtEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
    const empty = el("li", { class: "empty" }, mode === "chat" ? "Write a message to begin." : "Write the beginning of a text.");
    keepFocus(log, () => log.replaceChildren(...(turns().length ? turns().map(nodeOf) : [empty])));
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  /** Show what has come since, in the turn that runs alone: others keep their focus and their selection. */
  function renderRunning() {
    if (!running || running.mode !== mode) return;
    const isAtEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
    log.children[running.index]?.querySelector(".body").replaceChildren(...versionNodes(turns()[running.index], running.index));
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  // ---- what is done ----

  function edit(turn, index, body) {
    const text = el("textarea", { rows: Math.min(12, turn.text.split("\n").length + 1), value: turn.text, "aria-label": "Message" });
    const save = () => {
      turns().splice(index, Infinity, { ...turn, text: text.value, prompt: null });
      run(index + 1);
    };
    const cancel = () => {
      render();
      log.querySelector(`[data-key="edit-${index}"]`)?.focus();
    };
    text.onkeydown = (event) => {
      if (event.key === "Escape") cancel();
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
    turns().length = index + 1;
    const first = { ...emptyVersion(), text: prefix, tokens, startedAt: performance.now() };
    const versions = [first];
    turn.chosen = turn.versions.push(first) - 1;
    const own = (running = { abort: new AbortController(), index, mode });
    setRunning(true);
    render();
    const draw = onceAFrame(renderRunning);
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
      if (!isStopped && !settings.fail(error)) say(error.message, true);
      if (!isStopped) first.error = error.message;
      else say("stopped");
    }
    first.endedAt = performance.now();
    byId("announcement").textContent = `${NAMES.assistant}: ${first.text}`;
    turn.versions.push(...versions.slice(1));
    if (running === own) setRunning(false);
    render();
    const asked = turns()[index - 1];
    if (first.error || !asked?.images?.length || !byId("show-tokens").checked) return;
    try {
      asked.prompt = await promptOf(request.body);
      render();
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
      say("the browser does not let the page copy", true);
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

  // ---- how it is started ----

  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!prompt.value.trim() || running || settings.read() === null) return;
    if (mode === "completion") turns().length = 0;
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
  byId("show-tokens").onchange = () => {
    render();
    const isLate = byId("show-tokens").checked && turns().some((turn) => turn.versions && !turn.versions[turn.chosen].tokens.length);
    say(isLate ? "the next answer shows them" : "");
  };
  byId("export-json").onclick = exportJson;
  byId("export-curl").onclick = exportCurl;
  byId("clear").onclick = () => {
    stop();
    turns().length = 0;
    render();
    prompt.focus();
  };
  startTokenCard();
  let readsImages = true;
  return {
    allowImages(isAllowed) {
      readsImages = isAllowed;
      images.allow(mode === "chat" && readsImages);
    },
    setMode(name) {
      mode = name;
      images.allow(mode === "chat" && readsImages);
      byId("prompt-label").textContent = mode === "chat" ? "Message" : "Text to continue";
      prompt.placeholder = mode === "chat" ? "Write a message (Enter sends, Shift+Enter is a new line)" : "Text to continue (Ctrl+Enter sends)";
      render();
    },
  };
}
