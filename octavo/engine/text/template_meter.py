"""Inserts calls of the sandbox into a template that is compiled, which charge its budget."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from octavo.engine.text.template_budget import SIZE_OF_STEP


class Meter(NodeTransformer):
    """Inserts a call into each iteration and each macro, and calls methods for what is no filter, test or call."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_spend(1, node.lineno), node.test, lineno=node.lineno)
        return _metered_body(node)

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _metered_body(node)

    visit_CallBlock = visit_Macro  # noqa: N815

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        operands = [part for each in node.ops for part in (nodes.Const(each.op, lineno=node.lineno), each.expr)]
        return _own_call("compared", [node.expr, *operands], node.lineno)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _own_call("keyed", [node.key], node.lineno)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _own_call("made", [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _own_call("concatenated", node.nodes, node.lineno)


def _metered_body(node: Any) -> nodes.Node:
    written = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
    steps = 1 + written // SIZE_OF_STEP
    node.body.insert(0, nodes.ExprStmt(_spend(steps, node.lineno), lineno=node.lineno))
    assert isinstance(node, nodes.Node)
    return node


def _spend(steps: int, line: int) -> nodes.Expr:
    return _own_call("spend", [nodes.Const(steps, lineno=line)], line)


def _own_call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    """Return a call of a method of the sandbox."""
    method = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(method, args, [], None, None, lineno=line)
