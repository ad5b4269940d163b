"""What a template may cost: whatever it tries, it ends soon and small, by name."""

from __future__ import annotations

import time
from typing import Any

import pytest

from octavo.engine.chat_template import ChatTemplate, TemplateTooExpensive
from octavo.engine.template_sandbox import RenderLimits
from octavo.errors import InvalidRequest

LIMITS = RenderLimits(steps=20_000, seconds=60.0, value_size=100_000)


def render(source: str, content: Any = "hello", limits: RenderLimits = LIMITS, **variables: Any) -> str:
    template = ChatTemplate(source, name="model/chat_template.jinja")
    return template.render([{"role": "user", "content": content}], variables=variables, limits=limits)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
        "{% for a in range(99999) if false %}{% endfor %}",
        "{% for a in range(999) %}{% for b in range(999) if a < 0 %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [0] * 10**9 }}",
        "{{ 9**(9**9) }}",
        "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
        "{{ ns.s | tojson }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
        "{{ ns.s | string | length }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
        "{{ '%s' % (ns.s,) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ 'x'.zfill(10**9) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ 'x\ny' | indent(10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=999999999) }}",
        "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
        "{{ ('x' * 90000).join(range(9999) | map('string')) }}",
        "{{ range(9999) | join('x' * 90000) }}",
        "{{ ('x' * 90000).replace('x', 'y' * 90000) }}",
        "{{ ('x' * 90000) | replace('x', 'y' * 90000) }}",
        "{{ ('x' * 90000) | replace('', 'y' * 90000) }}",
        "{{ 'x\t'.expandtabs(10**9) }}",
        "{{ 'x'.translate({120: 'y' * 90000}) }}",
        "{{ (1).to_bytes(10**9, 'big') }}",
        "{{ [1] | tojson(indent=10**9) }}",
        "{{ range(99999) | map('string') | map('upper') | list | length }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% for x in [[]] * 9 recursive %}{{ loop([[]] * 9) if loop.depth < 99 else 0 }}{% endfor %}",
        "{% for i in range(9999) %}" + "long text " * 1000 + "{% endfor %}",
        "{% set x %}{% for i in range(9999) %}" + "y" * 1000 + "{% endfor %}{% endset %}",
    ],
)
def test_what_would_not_end_or_not_fit_is_stopped_and_names_the_template(source: str) -> None:
    started = time.process_time()
    with pytest.raises(TemplateTooExpensive, match=r"^model/chat_template\.jinja does not render") as caught:
        render(source)
    assert caught.value.field == "messages"
    assert time.process_time() - started < 5


@pytest.mark.parametrize("filter_name", ["batch(9)", "slice(9)", "urlize", "wordwrap(1)", "random", "pprint"])
def test_filters_that_no_chat_needs_are_not_there(filter_name: str) -> None:
    with pytest.raises(InvalidRequest, match="not valid Jinja"):
        render("{{ [1] | " + filter_name + " }}")


def test_time_is_limited_beside_steps() -> None:
    limits = RenderLimits(steps=10**9, seconds=0.01)
    with pytest.raises(TemplateTooExpensive, match="longer than 0.01 s"):
        render("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", limits=limits)


def test_what_a_template_says_is_cut() -> None:
    with pytest.raises(InvalidRequest, match="refuses") as caught:
        render("{{ raise_exception('x' * 90000) }}")
    assert len(str(caught.value)) < 1000


def test_source_that_nests_too_deeply_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid Jinja"):
        render("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for i in range(3) if i != 1 %}{{ loop.index }}{{ i }}{{ ',' if not loop.last }}{% endfor %}", "10,22"),
        ("{{ 'a' ~ 1 ~ none ~ ['b'] }}", "a1None['b']"),
        ("{{ 2 ** 10 }} {{ 7 % 4 }} {{ 'ab' * 2 }} {{ [1] + [2] }}", "1024 3 abab [1, 2]"),
        ("{{ '%s-%03d' % ('a', 7) }} {{ '%s' | format('b') }} {{ '{:>3}'.format(1) }}", "a-007 b   1"),
        ("{{ ['a', 'b'] | map('upper') | join(', ') }} {{ ', '.join(['a', 'b']) }}", "A, B a, b"),
        ("{{ 'aXb'.replace('X', 'yy') }} {{ 'aXb' | replace('X', 'z') }} {{ 'a' | center(3) }}|", "ayyb azb  a |"),
        ("{{ 'a\nb' | indent(2) }} {{ 'x'.ljust(2) }}|", "a\n  b x |"),
        ("{% macro f(n) %}<{{ n }}{{ caller() if caller }}>{% endmacro %}{{ f(1) }}", "<1>"),
        ("{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}in{% endcall %}", "<in>"),
        ("{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': 1, 'a': [true]} | tojson }} {{ [3, 1] | sort | first }}", '{"b": 1, "a": [true]} 1'),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
    ],
)
def test_what_templates_do_is_as_it_was(source: str, text: str) -> None:
    assert render(source) == text


def test_a_long_conversation_is_within_the_limits() -> None:
    messages = [{"role": "user", "content": "word " * 100}] * 4096
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ '\n' ~ loop.index }}{% endfor %}"
    assert len(ChatTemplate(source).render(messages)) > 2_000_000
