// The token view: each token shaded by its probability, with its alternatives on hover and on focus.
import { byId, button, el, lineAdder } from "./dom.js";
import { percent, surprise } from "./protocol.js";

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "→").replaceAll(" ", "·") || "∅";
const card = () => byId("token-card");
let hideTimer = 0;

function hide() {
  card().hidden = true;
}

/** Show the alternatives of a token next to it. */
function show(span, token, onbranch) {
  clearTimeout(hideTimer);
  const rows = token.top.map(({ text, logprob }) => {
    const isDrawn = text === token.text;
    const bar = el("i", { class: "share" });
    bar.style.width = `${Math.exp(logprob) * 100}%`;
    const act = () => {
      hide();
      onbranch(text);
    };
    const properties = { disabled: isDrawn || text.includes("\ufffd"), title: isDrawn ? "the drawn token" : "continue from here with this token" };
    return el("li", {}, bar, button(visible(text), act, properties), el("span", {}, percent(logprob)));
  });
  const drawn = token.top.some(({ text }) => text === token.text) ? null : el("p", {}, `drawn: ${visible(token.text)} ${percent(token.logprob)}`);
  card().replaceChildren(el("ol", {}, rows), ...(drawn ? [drawn] : []));
  card().hidden = false;
  const { left, bottom, top } = span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = card();
  card().style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  card().style.top = `${bottom + height + 8 < innerHeight ? bottom + 4 : Math.max(8, top - height - 4)}px`;
}

/** Return an element for tokens, and `show(tokens)`, which adds those that are new. `onbranch(i, text)` is called for token `i`
 * and the alternative that was chosen. */
export function tokenView(onbranch) {
  const [spans, shown] = [[], []];
  const node = el("div", { class: "tokens", role: "group", "aria-label": "Tokens; arrow keys move, Enter opens the alternatives" });
  const addToLine = lineAdder(node);
  const open = ({ target }) => {
    const at = spans.indexOf(target);
    if (at >= 0) show(target, shown[at], (text) => onbranch(at, text));
  };
  const leave = () => {
    clearTimeout(hideTimer);
    hideTimer = setTimeout(hide, 250);
  };
  for (const [event, act] of Object.entries({ mouseover: open, focusin: open, mouseout: leave })) node.addEventListener(event, act);
  node.addEventListener("keydown", (event) => {
    const at = spans.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to !== undefined && spans[to]) {
      event.preventDefault();
      spans[at].tabIndex = -1;
      spans[to].tabIndex = 0;
      spans[to].focus();
    } else if (event.key === "Enter" || event.key === "ArrowDown") {
      event.preventDefault();
      card().querySelector("button:not(:disabled)")?.focus();
    }
  });
  const add = (token) => {
    const properties = { class: "token", tabindex: spans.length ? -1 : 0, role: "button", "aria-label": `${visible(token.text)}, ${percent(token.logprob)}` };
    const span = el("span", properties, token.text);
    span.style.setProperty("--surprise", surprise(token.logprob).toFixed(3));
    shown.push(token);
    spans.push(span);
    addToLine(token.text, span);
  };
  return { node, show: (tokens) => tokens.slice(shown.length).forEach(add) };
}

/** Keep the card open while it is used, and close it on Esc and by a click elsewhere. */
export function startTokenCard() {
  card().addEventListener("mouseenter", () => clearTimeout(hideTimer));
  card().addEventListener("mouseleave", hide);
  card().addEventListener("keydown", (event) => {
    const buttons = [...card().querySelectorAll("button:not(:disabled)")];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) buttons.at((buttons.indexOf(event.target) + step) % buttons.length)?.focus();
    if (step) event.preventDefault();
  });
  addEventListener("scroll", hide, { capture: true, passive: true });
  addEventListener("pointerdown", (event) => card().contains(event.target) || event.target.closest(".token") || hide());
  addEventListener("keydown", (event) => event.key === "Escape" && !card().hidden && hide());
}
