"""What a template may cost: whatever it tries, it ends soon and small, by name."""

from __future__ import annotations

import time
from typing import Any

import pytest

from octavo.engine.text.chat_template import ChatOptions, ChatTemplate, TemplateTooExpensive
from octavo.engine.text.template_budget import RenderBudget, RenderLimits
from octavo.errors import InvalidRequest

NESTED = (
    "{% set ns = namespace(a=('x',), b=('x',), l=['x'], m=['x']) %}{% for i in range(99) %}"
    "{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}"
    "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}"
)
"""Values that take 2**99 steps to be compared, hashed or written."""

LIMITS = RenderLimits(steps=20_000, seconds=60.0, value_size=100_000)


def render(source: str, content: Any = "hello", limits: RenderLimits = LIMITS, **variables: Any) -> str:
    template = ChatTemplate(source, name="model/chat_template.jinja")
    return template.render([{"role": "user", "content": content}], ChatOptions(chat_template_kwargs=variables), limits)


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
        *(
            NESTED + source
            for source in (
                *("{{ ns.l == ns.m }}", "{{ 1 < 2 and ns.l != ns.m }}", "{{ ns.l < ns.m }}", "{{ ns.l in [ns.m] }}"),
                *("{{ {ns.a: 1} }}", "{{ {}[ns.a] }}", "{{ {}.get(ns.a) }}", "{{ [ns.a] | unique | list }}"),
                *("{{ [ns.l, ns.m] | sort }}", "{{ [ns.l, ns.m] | max }}", "{{ [ns.l].count(ns.m) }}"),
                *("{{ [ns.l] | select('eq', ns.m) | list }}", "{{ ns.l is eq(ns.m) }}", "{{ ns.l is in([ns.m]) }}"),
                *("{{ '{}'.format(ns.l) }}", "{{ '%s' | format(ns.l) }}", "{{ '%s' % ns }}", "{{ ns }}"),
                *("{{ ns.l | replace('a', 'b') }}", "{{ ns.l | urlencode }}", "{{ ns.l | wordcount }}"),
                *("{{ '{0.l}'.format(ns) }}", "{{ {'a': ns.l}.values() }}", "{{ ns.l is lower }}"),
                *("{{ ns.l | safe }}", "{{ ns.l | center(9) }}", "{{ raise_exception(ns.l) }}"),
                "{% for i in [1] %}{{ loop.changed(ns.l) }}{{ loop.changed(ns.m) }}{% endfor %}",
            )
        ),
        "{{ ('%(a)s' * 9999) % {'a': 'x' * 9999} }}",
        "{{ ('{0}' * 9999).format('x' * 9999) }}",
        "{{ ('{a}' * 9999).format(a='x' * 9999) }}",
        "{{ ('x' * 90000).strip('y' * 90000) }}",
        "{{ ('x' * 90000) | trim('y' * 90000) }}",
        "{{ ('x' * 90000).encode('punycode') }}",
        "{{ ('<!---->' * 9999) | safe | attr('striptags') }}{{ (('<!---->' * 9999) | safe).striptags() }}",
        "{{ ('f' * 90000) | int(base=16) }}",
        "{{ ([[1]] * 90000) | sum(start=[]) }}",
        "{{ range(9999) | map(attribute='0.' * 9999) | list }}",
        "{% set a = 'x' * 90000 %}{% for i in range(9999) %}{% set b = a[1:] %}{% endfor %}",
        "{% set a = 'x' * 90000 %}{% for i in range(9999) %}{% set b = a.count('xy') %}{% endfor %}",
        "{% set a = [1] * 90000 %}{% for i in range(9999) %}{% set b = 2 in a %}{% endfor %}",
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
    with pytest.raises(TemplateTooExpensive, match="more than 0.01 s of processor time"):
        render("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", limits=limits)


def test_a_busy_machine_takes_no_time_from_a_template() -> None:
    budget = RenderBudget(RenderLimits(seconds=0.01))
    time.sleep(0.03)
    assert budget.spend(1000)


def test_what_a_template_says_is_cut() -> None:
    with pytest.raises(InvalidRequest, match="refuses") as caught:
        render("{{ raise_exception('x' * 90000) }}")
    assert len(str(caught.value)) < 1000


def test_source_with_a_number_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid Jinja"):
        render("{{ " + "9" * 9999 + " }}")


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
        ("{{ 1 < 2 <= 2 < 1 }} {{ 'a' in ['a'] }} {{ 'b' not in 'abc' }} {{ nothing == 1 }}", "False True False False"),
        ("{{ {'a' ~ 1: 2}['a1'] }} {{ {(1, 2): 3}[(1, 2)] }} {{ 'abc'[::-1] }} {{ 'b' is in 'abc' }}", "2 3 cba True"),
        (
            "{{ [3, 1, 2] | sort(reverse=true) | join }} {{ ['a', 'a'] | unique | list }} {{ [1, 2] | sum }}",
            "321 ['a'] 3",
        ),
        (
            "{{ '{a}{0}'.format(1, a=2) }} {{ ' a '.strip() }} {{ '%(a)s' % {'a': 1} }} {{ 'ff' | int(base=16) }}",
            "21 a 1 255",
        ),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
    ],
)
def test_what_templates_do_is_as_it_was(source: str, text: str) -> None:
    assert render(source) == text


def test_a_long_conversation_is_within_the_limits() -> None:
    messages = [{"role": "user", "content": "word " * 100}] * 4096
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ '\n' ~ loop.index }}{% endfor %}"
    assert len(ChatTemplate(source).render(messages)) > 2_000_000
