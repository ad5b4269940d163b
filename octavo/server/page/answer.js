// The answer of a model, as an element that grows: new parts are appended, existing ones are not touched.
import { byId, el, lineAdder } from "./dom.js";
import { markdownView } from "./markdown.js";
import { summaryOf } from "./protocol.js";
import { tokenView } from "./tokens.js";

/** Return an element for a text, and `show(text)`, which adds what the text has more than before. */
function growing(name, properties) {
  const node = el(name, properties);
  const add = lineAdder(node);
  let length = 0;
  const show = (text) => {
    for (const piece of text.slice(length).split(/(?<=\n)/)) if (piece) add(piece);
    length = text.length;
  };
  return { node, show };
}

/** Return the element of a call, and `show()`. Arguments that are complete are shown as JSON over several lines. */
function callView(call, form) {
  const text = growing("pre");
  const name = el("h4");
  const show = () => {
    if (call.name !== name.dataset.name) name.textContent = `calls ${(name.dataset.name = call.name)}`;
    text.show(form === undefined ? call.arguments : readable(call.arguments));
  };
  return { node: el("div", { class: "call" }, name, text.node, form), show };
}

function readable(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 1);
  } catch {
    return json; // the answer was cut within the call
  }
}

/** Return the body of a turn of the model: its element, and `update()`, which adds what has come since.
 * `branch(i, text)` continues with another token; `formOf(call)` returns the form for the answer of a call, or null; with
 * `copy(text, name)` the text is Markdown. */
export function answerView(turn, { isRunning, branch, formOf, copy }) {
  const version = turn.versions[turn.chosen];
  const plain = () => growing("div", { class: "text" });
  const [reasoning, text] = [plain(), copy ? markdownView(copy) : plain()];
  const keepFold = () => (turn.showsReasoning = !fold.open);
  const fold = el("details", { class: "reasoning" }, el("summary", { onclick: keepFold }, "Reasoning"), reasoning.node);
  const [tokens, calls, end] = [tokenView(branch), el("div"), el("p")];
  const showsTokens = byId("show-tokens").checked;
  const callViews = [];
  const node = el("div", { class: "body" }, text.node, tokens.node, calls, end);
  const update = () => {
    const isOpen = version.endedAt == null && isRunning();
    if (version.reasoning) {
      if (!fold.parentNode) node.prepend(fold);
      reasoning.show(version.reasoning);
      fold.open = turn.showsReasoning ?? (isOpen && !version.text);
    }
    tokens.node.hidden = !(showsTokens && version.tokens.length);
    text.node.hidden = !tokens.node.hidden;
    if (text.node.hidden) tokens.show(version.tokens);
    else text.show(version.text, !isOpen);
    version.calls.forEach((call, i) => {
      if (!callViews[i]) calls.append((callViews[i] = callView(call, isOpen ? undefined : formOf(call))).node);
      callViews[i].show();
    });
    if (version.error && !node.querySelector(".wrong")) end.before(el("p", { class: "wrong", role: "alert" }, version.error));
    const isWaiting = isOpen && version.firstAt == null;
    end.className = isWaiting ? "waiting" : "summary";
    const note = isWaiting ? version.held || "waiting for the first token…" : summaryOf(version);
    if (end.textContent === note) return;
    end.textContent = note;
    node.normalize(); // an emoji whose parts came one by one is drawn as one
  };
  update();
  return { node, update };
}
