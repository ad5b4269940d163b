// Elements are made from text alone: nothing that a model or a user wrote is ever read as HTML.

export const byId = (id) => document.getElementById(id);

/** Return a new element. Properties are attributes, but for `on…` (listeners) and `value`, `checked`. */
export function el(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "checked") node[key] = value;
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child != null && child !== false));
  return node;
}

/** Return a small button with a text. */
export const button = (text, onclick, properties = {}) =>
  el("button", { type: "button", class: "quiet", onclick, ...properties }, text);

/** Return `add(text, node)`, which adds to the last line of `parent`. Each line is a block, so that the browser lays out that one
 * alone again, and each has the direction of its own script. */
export function lineAdder(parent) {
  let line = null;
  return (text, node = text) => {
    line ??= parent.appendChild(el("div"));
    line.append(node);
    if (text.endsWith("\n")) line = null;
  };
}

/** Run `change`, which makes the elements of `root` anew, and keep the focus on the one with the same data-key. */
export function keepFocus(root, change) {
  const key = root.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  change();
  if (key) root.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}

/** Return a function that runs `act` in the next frame, once for all calls before it. */
export function onceAFrame(act) {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => {
      waits = false;
      act();
    });
  };
}
