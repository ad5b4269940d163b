// Markdown in the answers of a chat, line by line: a line is styled when it is complete. Marks are hidden, and nothing is HTML.
import { button, el, lineAdder } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)\s*$/;
const INLINE = /(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)|(\*\*)(?=\S)(.*?\S)\*\*(?!\*)/g;

const MOST_STYLED = 10_000; // characters of a line: looking for marks takes their square

/** Return the pieces of a line as [kind, text]: "mark", "code", "strong" or "text". Joined they are the line. */
function piecesOf(line) {
  if (line.length > MOST_STYLED) return [["text", line]];
  const pieces = [];
  let end = 0;
  for (const found of line.matchAll(INLINE)) {
    const mark = found[1] ?? found[3];
    pieces.push(["text", line.slice(end, found.index)], ["mark", mark], [found[1] ? "code" : "strong", found[2] ?? found[4]], ["mark", mark]);
    end = found.index + found[0].length;
  }
  pieces.push(["text", line.slice(end)]);
  return pieces.filter(([, text]) => text !== "");
}

/** Return how a line is shown: its kind ("fence" and "end" of a block of code, "code", "row" of a table, "heading" or "line"), its
 * pieces, and the mark of the block that is open after it, "" for none. `open`: that of the line before. */
export function readLine(line, open) {
  const fence = FENCE.exec(line);
  if (open) {
    const closes = fence?.[1].startsWith(open) && !fence[2];
    return closes ? { kind: "end", pieces: [["mark", line]], open: "" } : { kind: "code", pieces: [["text", line]], open };
  }
  if (fence) return { kind: "fence", pieces: [["mark", line.slice(0, line.length - fence[2].length)], ["text", fence[2]]], open: fence[1] };
  if (/^\s*\|.*\|\s*$/.test(line)) return { kind: "row", pieces: [["text", line]], open };
  const heading = /^#{1,6} (?=\S)/.exec(line)?.[0];
  if (heading) return { kind: "heading", pieces: [["mark", heading], ...piecesOf(line.slice(heading.length))], open };
  return { kind: "line", pieces: piecesOf(line), open };
}

const ELEMENTS = { mark: "span", code: "code", strong: "strong" };

/** Return an element for a text, and `show(text, isWhole)`, which adds what the text has more than before.
 * `copy(text, name)` is called for the button of a block of code. */
export function markdownView(copy) {
  const node = el("div", { class: "text markdown" });
  const add = lineAdder(node);
  let [length, start, styled, open] = [0, 0, 0, ""]; // `start`: of the first line that is not styled, which is child `styled`
  const codeAfter = (line) => {
    const lines = [];
    while ((line = line.nextElementSibling)?.className === "code") lines.push(line.textContent);
    return lines.join("");
  };
  const style = (line, text) => {
    const read = readLine(text.replace(/\n$/, ""), open);
    open = read.open;
    line.className = read.kind;
    const pieces = read.pieces.map(([kind, part]) => (kind === "text" ? part : el(ELEMENTS[kind], { class: kind === "mark" && kind }, part)));
    line.replaceChildren(...pieces);
    if (read.kind === "fence") line.append(button("Copy", () => copy(codeAfter(line), "the code")));
    if (text.endsWith("\n")) line.append(["fence", "end"].includes(read.kind) ? el("span", { class: "mark" }, "\n") : "\n");
  };
  const show = (text, isWhole) => {
    for (const piece of text.slice(length).split(/(?<=\n)/)) if (piece) add(piece);
    length = text.length;
    for (let end; start < length; start = end) {
      end = text.indexOf("\n", start) + 1 || (isWhole ? length : 0);
      if (!end) break;
      style(node.children[styled++], text.slice(start, end));
    }
  };
  return { node, show };
}
