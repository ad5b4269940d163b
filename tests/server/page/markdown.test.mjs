// Run by test_protocol.py: `node --test`.
import assert from "node:assert/strict";
import { test } from "node:test";
import { readLine } from "../../../octavo/server/page/markdown.js";

const piecesOf = (line) => readLine(line, "").pieces;
const shown = (line) => piecesOf(line).filter(([kind]) => kind !== "mark").map(([, text]) => text).join("");

test("marks of strong text, code and headings are hidden, and the pieces are the line", () => {
  assert.deepEqual(piecesOf("a **b** c"), [["text", "a "], ["mark", "**"], ["strong", "b"], ["mark", "**"], ["text", " c"]]);
  assert.deepEqual(piecesOf("`x**y**`"), [["mark", "`"], ["code", "x**y**"], ["mark", "`"]]);
  assert.equal(shown("## The end"), "The end");
  for (const line of ["# a `b` **c**", "- **x**: y", "``a`b``", "**", "", "| a | b |", "```py", "<b>x</b>"]) {
    assert.equal(piecesOf(line).map(([, text]) => text).join(""), line);
  }
});

test("what only looks like a mark is text", () => {
  for (const line of ["2 ** 3 ** 4", "#hashtag", "**open", "`open", "a_b_c * d", "``` x ` y"]) assert.equal(shown(line), line);
});

test("a block of code ends at its own fence, and has no marks within", () => {
  const kinds = [];
  let open = "";
  for (const line of ["````md", "```", "# **x**", "````", "# x"]) {
    const read = readLine(line, open);
    open = read.open;
    kinds.push(read.kind);
  }
  assert.deepEqual(kinds, ["fence", "code", "code", "end", "heading"]);
});

test("a very long line is text, whatever it has", () => {
  const line = "**a** ".repeat(2_000);
  assert.equal(shown(line), line);
  assert.deepEqual(readLine(`# ${line}`, "").pieces, [["mark", "# "], ["text", line]]);
});
