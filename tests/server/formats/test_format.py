"""Every format on texts as models write them: nested and empty arguments, quotes, unicode, none, several."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

import octavo.server.formats
from octavo.errors import ConfigError
from octavo.server.formats.events import ReadCall, ReadOutput
from octavo.server.formats.format import Field, Format, format_of, templates
from octavo.server.formats.marks import Marks
from octavo.server.formats.parser import OutputParser
from tests.fakes.written_calls import TEXTS, THREE
from tests.server.formats.test_parser import cuttings, output_of, read

FILES = sorted(Path(octavo.server.formats.__file__).parent.glob("*.json"))
OPEN = '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="d" type="string"<|sep|>V'
CLOSE = "<|close|>argument<|sep|><|close|>call<|sep|>"
TOOLS: dict[str, Any] = {
    "f": {"properties": {"d": {"type": "string"}}},
    "g": {},
    "h": {"properties": {"s": {"type": "string"}}},
}


def form(name: str) -> Format:
    return templates()[name].format(name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_has_no_key_that_is_not_read_and_its_names_are_documented(file: Path) -> None:
    table = json.loads(file.read_text(encoding="utf-8"))
    page = (Path(__file__).parents[3] / "docs" / "recipes" / "tools.md").read_text(encoding="utf-8")
    assert set(table.get("tool_calls", ())) <= set(Field.__struct_fields__)
    for row in table["formats"].values():
        assert set(row) <= {"names", "detect", "thinking", "tool_calls", "content"}
        for name in ("thinking", "tool_calls", "content"):
            assert set(row.get(name, ())) <= set(Field.__struct_fields__)
        assert [each for each in row["names"] if f"`{each}`" not in page] == [], "docs/recipes/tools.md lists all names"


def test_no_format_is_in_two_files() -> None:
    named = [name for file in FILES for name in json.loads(file.read_text(encoding="utf-8"))["formats"]]
    assert sorted(named) == list(templates())


@pytest.mark.parametrize("name", [name for name, each in templates().items() if "tool_calls" in each.fields])
def test_calls_are_read_however_the_text_is_cut(name: str) -> None:
    assert name in TEXTS, "write the calls THREE in this format into TEXTS"
    text = TEXTS[name]
    wanted = [(call.name, json.loads(call.arguments)) for call in THREE]
    whole = read(form(name), [text], tools=TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == wanted
    assert (whole.text, whole.reasoning) == (None, "so" if name == "gpt_oss" else None)
    for pieces in cuttings(text, 6):
        assert read(form(name), pieces, tools=TOOLS) == whole


@pytest.mark.parametrize("name", ["cohere", "granite", "hunyuan", "llama3", "mistral", "nemotron"])
def test_a_list_that_is_cut_within_a_later_call_has_the_calls_before_it(name: str) -> None:
    text, second = TEXTS[name], TEXTS[name].index('"g"')
    for end in range(second - 12, second + 18):
        found = read(form(name), [text[:end]], tools=TOOLS)
        assert [call.name for call in found.calls] in (["f"], ["f", "g"])
        assert read(form(name), list(text[:end]), tools=TOOLS) == found
    left = read(form(name), [text[: second + 6]], tools=TOOLS).text
    assert left is not None
    assert left.startswith("{")
    assert text[: second + 6].endswith(left)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_text_that_is_spoilt_anywhere_is_read_however_it_is_cut(name: str) -> None:
    draw = random.Random(name)
    for _ in range(8):
        text = TEXTS[name]
        for _ in range(draw.randrange(1, 4)):
            start, length = draw.randrange(len(text)), draw.randrange(12)
            text = text[:start] + draw.choice(['"', "{", "}]", "\\", "é", "", text[:20]]) + text[start + length :]
        whole = read(form(name), [text], tools=TOOLS)
        assert all(read(form(name), pieces, tools=TOOLS) == whole for pieces in cuttings(text, 2)), text


@pytest.mark.parametrize(
    ("chat_template", "name"),
    [
        ("{{ '<|tool_calls_section_begin|>' }} <|tool_call_argument_begin|> </think>", "kimi_k2+think"),
        ("'<minimax:tool_call>' <invoke name= <parameter name= </think>", "minimax_m2+think"),
        ("{%- set dsml_token = '｜DSML｜' -%} '<' + dsml_token + 'tool_calls>' </think>", "deepseek_v4+think"),
        ("'<｜DSML｜function_calls>' </think>", "deepseek_v32+think"),
        ("'<tool_calls>' '<tool_call>' '<tool_sep>' '<arg_key>' '<arg_value>' </think>", "hy_v3+think"),
        ("'<tool_calls:opensource>' '<tool_sep:opensource>' '<arg_key' '<arg_value' </think>", "hy_v3_suffixed"),
        ("{% set s=':opensource' %} '<tool_calls{}>' '<arg_key{}>' '<arg_value{}>' </think>", "hy_v4"),
        ("{%- set ns_token = ']<]minimax[>[' -%} '<tool_call>' '<mm:think>' <invoke name= </think>", "minimax_m3"),
        ("<tool_call> <arg_key> </arg_key> <arg_value> </think> <assistant>", "glm+think"),
        ("<seed:think> <seed:tool_call> <function= <parameter=", "seed_oss"),
        ("<longcat_tool_call>", "longcat"),
        ("<|action_start|><|plugin|>", "internlm"),
        ('<tool_call> "arguments" </think> <response>', "hermes+ernie_think"),
        ("<think>\n\n</think> <answer> <|extra_0|> <tool_calls> </tool_calls>", "hunyuan+hunyuan_think"),
        ("<|tool_list_start|>", "lfm2"),
        ("'<|tool_call>call:' '}<tool_call|>' '<|channel>thought\\n<channel|>'", "gemma4"),
        ("'<start_function_call>call:' '<escape>'", "functiongemma"),
        ("'<|open|>' '<|close|>' '<|sep|>' open_tag('tools')", "kimi_k3"),
        ("role_sep=\"<|role_sep|>\\n\" 'role': 'function call'", "gigachat3"),
        ("<|role_sep|> <|function_call|>", "gigachat31"),
        ("<ifm|tool_calls> <ifm|think>", "k2_horizon"),
        ("{%- set dsml_token = '｜DSML｜' -%} '<' + dsml_token + ' calls>' </think>", "deepseek_v41+think"),
        ("'<|tools_prefix|>'", "apertus"),
        ("<function_calls></function_calls> <think> </think>", "olmo3+think"),
        ('[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}]', "xlam"),
        ("<|tool_calls_begin｜> <steptml:invoke name= </think>", "step3+think"),
        ("<dots_function_call>", "dots"),
        ("<|content_thinking|> <|content_invoke_tool_json|>", "inkling"),
        ('<function name="f"><param name="x"> </think>', "minicpm5+think"),
        ("<|plamo:begin_tool_request:plamo|>", "plamo3"),
        ("to=self <|message|> <atem:function_calls>", "muse"),
        ("write your thoughts after 'Here is my thought process:' <|tool_call|> Granite", "granite+granite_think"),
    ],
)
def test_a_chat_template_leads_to_its_format(chat_template: str, name: str) -> None:
    found = format_of(chat_template)
    assert found is not None
    assert found.name == name


def test_ids_that_a_model_writes_are_kept() -> None:
    for pieces in cuttings(TEXTS["kimi_k2"].replace(":1<", ":12<"), 6):
        calls = output_of(OutputParser(form("kimi_k2"), TOOLS), pieces).calls
        assert [call.id for call in calls] == ["functions.f:0", "functions.g:12", "functions.h:2"]


def test_tags_within_tags_are_objects_and_lists_of_the_schema_and_texts_stay_as_they_are() -> None:
    schema = {
        "a": {"type": "array", "items": {"type": "object", "properties": {"b": {"type": "string"}}}},
        "c": {"type": "string"},
        "d": {"type": "object"},
        "e": {"type": "array"},
    }
    body = (
        "N<a>\nN<item>\nN<b> 7\nN</b>\nN</item>\nN</a>\nN<c>\n  xN</d>N<z>\n\nN</c>"
        'N<d>N</d>N<e>N</e>N<f>N<x>1N</x>N<x>2N</x>N</f>N<g>{"h": [1]}N</g>'
    )

    def text(body: str) -> str:
        call = f'ok N<tool_call>\nN<invoke name="f">\n{body}N</invoke>\nN</tool_call>'
        return call.replace("N<", "]<]minimax[>[<")

    wanted = {
        "a": [{"b": " 7\n"}],
        "c": "\n  x]<]minimax[>[</d>]<]minimax[>[<z>\n\n",
        "d": {},
        "e": [],
        "f": {"x": [1, 2]},
        "g": {"h": [1]},
    }
    for pieces in cuttings(text(body), 6):
        output = read(form("minimax_m3"), pieces, tools={"f": {"properties": schema}})
        assert (output.text, [json.loads(call.arguments) for call in output.calls]) == ("ok", [wanted])
    deep = "N<k>" * 5000 + "N</k>" * 5000
    [call] = read(form("minimax_m3"), [text(deep)], tools={"f": {}}).calls
    assert call.arguments.startswith('{"k": ')


def test_close_marks_of_other_keys_are_text_and_no_key_has_patterns_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    value = "N</x>N</y]<]minimax[>[</NN</"
    texts = [f"N<k{place}>{value}N</k{place}>N<l>N<m{place}>{value}N</m{place}>N</l>" for place in range(100)]
    text = f'N<tool_call>\nN<invoke name="f">\n{"".join(texts[:2])}N</invoke>\nN</tool_call>'.replace(
        "N<", "]<]minimax[>[<"
    )
    kept = value.replace("N<", "]<]minimax[>[<")
    for schema in ({}, {"k0": {"type": "string"}, "k1": {"type": "string"}}):
        for pieces in cuttings(text, 6):
            [call] = read(form("minimax_m3"), pieces, tools={"f": {"properties": schema}}).calls
            assert json.loads(call.arguments) == {"k0": kept, "l": {"m1": kept}, "k1": kept}
    compiled: list[object] = []
    whole = re.compile
    monkeypatch.setattr(re, "compile", lambda *args: compiled.append(args) or whole(*args))
    text = f'N<tool_call>\nN<invoke name="f">\n{"".join(texts)}N</invoke>\nN</tool_call>'.replace(
        "N<", "]<]minimax[>[<"
    )
    [call] = read(form("minimax_m3"), [text], tools={"f": {}}).calls
    assert len(compiled) < 20


def test_a_lone_end_mark_before_an_answer_without_reasoning_is_left_out() -> None:
    assert read(form("minimax_m3"), ["</mm:think>Yes."]).text == "Yes."


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("minimax_m2", '<invoke name="f"><parameter name="d">V</parameter></invoke>', " \n  a\n\n"),
        ("glm", "<tool_call>f<arg_key>d</arg_key><arg_value>V</arg_value></tool_call>", "\n  a\n"),
        ("deepseek_v4", '<D|invoke name="f"><D|parameter name="d" string="true">V</D|parameter></D|invoke>', "a\n"),
        ("hy_v3", "<tool_call>f<tool_sep><arg_key>d</arg_key><arg_value>V</arg_value></tool_call>", "\ta\n"),
        ("mimo", "<tool_call>\n<function=f>\n<parameter=d>V</parameter>\n</function>\n</tool_call>", "\na\n"),
        ("seed_oss", "<seed:tool_call><function=f><parameter=d>V</parameter></function></seed:tool_call>", "\na\n\n"),
        ("kimi_k3", OPEN + CLOSE, "\n\na "),
        ("minicpm5", '<function name="f"><param name="d"><![CDATA[V]]></param></function>', " &lt;a> "),
        ("gemma4", '<|tool_call>call:f{d:<|"|>V<|"|>}<tool_call|>', '\n{"a": [1,} '),
    ],
)
def test_white_space_of_a_text_is_a_part_of_it_where_models_write_none_beside_it(
    name: str, text: str, value: str
) -> None:
    text = text.replace("D|", "｜DSML｜").replace("V", value)
    for tools in (TOOLS, {"f": {"properties": {"d": {"type": ["string", "null"]}}}}):
        for pieces in cuttings(text, 6):
            [call] = read(form(name), pieces, tools=tools).calls
            assert json.loads(call.arguments) == {"d": value}


def test_a_model_says_whether_a_value_is_a_text_where_the_schema_does_not() -> None:
    def value(name: str, text: str, schema: dict[str, Any]) -> Any:
        [call] = read(form(name), [text], tools={"f": {"properties": {"d": schema}}}).calls
        return json.loads(call.arguments)["d"]

    for name, yes, no in (
        ("deepseek_v32", 'string="true"', 'string="false"'),
        ("kimi_k3", 'type="string"', 'type="number"'),
    ):
        dsml = '<D|invoke name="f"><D|parameter name="d" T>V</D|parameter></D|invoke>'
        text = (OPEN + CLOSE if name == "kimi_k3" else dsml).replace("D|", "｜DSML｜").replace("V", "5")
        marked, plain = (text.replace("T", kind).replace('type="string"', kind) for kind in (yes, no))
        for schema in ({}, {"type": ["string", "integer"]}, {"anyOf": [{"type": "string"}, {"type": "integer"}]}):
            assert (value(name, marked, schema), value(name, plain, schema)) == ("5", 5)
        assert value(name, marked, {"type": "integer"}) == 5
        assert value(name, plain, {"type": "string"}) == "5"
    for text, wanted in (("5", "5"), ("null", None)):
        call = f"<tool_call>f<arg_key>d</arg_key><arg_value>{text}</arg_value></tool_call>"
        assert value("glm", call, {"type": ["string", "null"]}) == wanted


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hunyuan_think", "<think>\nhm\n</think>\n<answer>\nYes.\n</answer>"),
        ("ernie_think", "<think>\nhm\n</think>\n\n<response>\nYes.\n</response>\n"),
        ("seed_oss", "<seed:think>hm</seed:think>Yes."),
        ("longcat", "<longcat_think>hm</longcat_think>Yes."),
        ("minimax_m3", "<mm:think>\nhm\n</mm:think>\n\nYes."),
        ("cohere", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"),
        ("gemma4", "<|channel>thought\nhm\n<channel|>Yes.<turn|>"),
        ("granite_think", "Here is my thought process: hm\n\nHere is my response: Yes."),
        ("k2_horizon", "<ifm|think_fast>hm</ifm|think_fast>\nYes."),
        ("kimi_k3", "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>"),
        ("inkling", "<|content_thinking|>hm<|end_message|><|message_model|><|content_text|>Yes.<|end_message|>"),
        ("plamo3", "<|plamo:begin_think:plamo|>hm<|plamo:end_think:plamo|>Yes.<|plamo:tag|>"),
        ("muse", " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>"),
        ("muse", " to=self<|message|>hm to=user<|message|>Yes.<|eot|>"),
    ],
)
def test_reasoning_is_parted_from_the_answer(name: str, text: str) -> None:
    for pieces in cuttings(text, 6):
        assert output_of(OutputParser(form(name), {}), pieces) == ReadOutput("Yes.", "hm", [])


@pytest.mark.parametrize("name", ["llama3", "pythonic"])
def test_text_that_only_looks_like_a_bare_call_stays_text(name: str) -> None:
    for text in ('{"name": "Bob", "age": 3}', " [1, 2]", '{"name": "Bob", "parameters": {}}', "[x(1)]", "[", "{a"):
        for pieces in cuttings(text, 2):
            assert read(form(name), pieces, tools=TOOLS) == ReadOutput(text, None, [])


@pytest.mark.parametrize(("name", "mark"), [("qwen3_coder", "tool_call"), ("seed_oss", "seed:tool_call")])
def test_calls_without_the_outer_mark_and_several_within_it_are_read(name: str, mark: str) -> None:
    call = "<function=f>\n<parameter=d>x</parameter>\n</function>"
    wanted = [ReadCall("", "f", '{"d": "x"}')]
    for text, count in (
        (f"{call}", 1),
        (f"{call}\n{call}", 2),
        (f"<{mark}>\n{call}", 1),
        (f"<{mark}>\n{call}\n{call}\n</{mark}>", 2),
        (f"{call}\n</{mark}>", 1),
    ):
        for pieces in cuttings(f"So: {text}", 4):
            assert read(form(name), pieces, tools=TOOLS) == ReadOutput("So:", None, wanted * count)


@pytest.mark.parametrize("name", ["glm", "qwen3_coder", "minimax_m2", "deepseek_v4", "hy_v3", "kimi_k3", "minicpm5"])
def test_close_marks_in_strings_of_json_are_a_part_of_them(name: str) -> None:
    calls = form(name).calls
    assert calls is not None
    assert calls.tag is not None
    close = calls.tag.close.spelled()
    values = {"a": {"b": f'x{close}"{close}\\'}, "c": [close, 1]}
    body = ""
    for key, value in values.items():
        opening = calls.tag.open.spelled(key=key, is_string="false", type="object")
        body += opening + json.dumps(value, ensure_ascii=False) + close
    text = calls.opens[0].spelled(name="f", index="0") + body + calls.closes[0].spelled()
    for pieces in cuttings(text, 4):
        [call] = read(form(name), pieces, tools=TOOLS).calls
        assert json.loads(call.arguments) == values
    opening = calls.tag.open.spelled(key="a", is_string="false", type="object")
    spoilt = text.replace(body, f'{opening}["x{close}{body}')
    for pieces in cuttings(spoilt, 4):  # a quote that never ends takes nothing of what follows
        [call] = read(form(name), pieces, tools=TOOLS).calls
        assert call.arguments.startswith('{"a": "[\\"x", "a": {"b": ')


def test_numbers_of_any_size_are_numbers_and_others_are_texts() -> None:
    for text, wanted in (("1e400", float("inf")), ("9" * 40, int("9" * 40)), ("NaN", "NaN"), ("Infinity", "Infinity")):
        call = f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>"
        [found] = read(form("glm"), [call], tools=TOOLS).calls
        assert json.loads(found.arguments) == {"x": wanted}


def test_python_calls_have_keys_that_python_does_not() -> None:
    for pieces in cuttings("[f(a-b.c=1, key x='y')]", 6):
        [call] = read(form("pythonic"), pieces, tools=TOOLS).calls
        assert json.loads(call.arguments) == {"a-b.c": 1, "key x": "y"}


def test_calls_in_a_fence_of_code_are_read_and_other_fences_stay() -> None:
    call = '[{"name": "f", "arguments": {}}]'
    for text, left, count in (
        (f"I call:\n```json\n{call}\n```\nThen:\n```py\nx\n```", "I call:\nThen:\n```py\nx\n```", 1),
        (f"{call}\n\nThen ```a``` b", "Then ```a``` b", 1),
        ("Use:\n```json\n[1, 2]\n```\nbye", "Use:\n```json\n[1, 2]\n```\nbye", 0),
        ('```\n[{"name": "x", "arguments": {}}]\n```', '```\n[{"name": "x", "arguments": {}}]\n```', 0),
    ):
        for pieces in cuttings(text, 6):
            found = read(form("xlam"), pieces, tools=TOOLS)
            assert (found.text, len(found.calls)) == (left, count)


@pytest.mark.parametrize("name", [name for name, each in templates().items() if "tool_calls" in each.fields])
def test_arguments_of_a_call_that_is_cut_are_not_closed(name: str) -> None:
    text = TEXTS[name]
    whole = read(form(name), [text], tools=TOOLS).calls
    for end in range(0, len(text), 23):
        parser = OutputParser(form(name), TOOLS)
        calls = output_of(parser, [text[:end]]).calls
        assert [each.name for each in calls] == [each.name for each in whole[: len(calls)]]
        if calls and not parser.has_called:
            with pytest.raises(json.JSONDecodeError):
                json.loads(calls[-1].arguments)


@pytest.mark.parametrize(("name", "left"), [("hermes", "\n</tool_c"), ("qwen3_coder", "\n</tool"), ("xlam", "\n``")])
def test_a_close_mark_that_is_cut_is_no_text(name: str, left: str) -> None:
    opened = {"xlam": "```json\n"}.get(name, "")
    call = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}',
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>",
        "xlam": '[{"name": "f", "arguments": {"a": "x"}}]',
    }[name]
    for pieces in cuttings(opened + call + left):
        found = read(form(name), pieces, tools=TOOLS)
        assert (found.text, [each.name for each in found.calls]) == (None, ["f"])
    behind = "</tool_call>" if name != "xlam" else "\n```\n"
    assert read(form(name), [f"{opened}{call}{behind}a <"], tools=TOOLS).text == "a <"


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_no_part_of_a_mark_behind_a_call_is_text(name: str) -> None:
    """Text stays where a further call has begun, whose name has not come."""
    text = TEXTS[name]
    for end in range(len(text)):
        found = read(form(name), [text[:end]], tools=TOOLS)
        if found.calls and found.text is not None:
            calls = form(name).calls
            assert calls is not None
            inside = Marks(calls.opens).search(text[:end], text[:end].rindex(found.text), True)[1]
            assert inside is not None or found.text.startswith("{"), (text[:end], found.text)
        if end % 16 == 1:
            assert read(form(name), [*text[:end]], tools=TOOLS) == found


def test_a_backslash_at_which_a_call_is_cut_belongs_to_its_arguments() -> None:
    found = read(form("hermes"), ['<tool_call>\n{"name": "f", "arguments": {"d": "a\\'], tools=TOOLS)
    assert (found.text, found.calls[0].arguments) == (None, '{"d": "a\\')


def test_channels_of_gpt_oss_become_reasoning_and_text() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    for pieces in cuttings(text):
        assert read(form("gpt_oss"), pieces) == ReadOutput("Yes.", "hm", [])


def test_messages_of_muse_become_reasoning_text_and_calls() -> None:
    call = '<atem:invoke name="f.f">\n<atem:parameter name="d">1</atem:parameter>\n</atem:invoke>'
    messages = (
        f"self<|message|>I call {call}",
        "commentary<|message|>Wait.",
        f"f.f<|message|><atem:function_calls>\n{call}\n</atem:function_calls>",
        'g<|message|><atem:function_calls>\n<atem:invoke name="x.g">\n</atem:invoke>\n</atem:function_calls>',
    )
    text = "<|start|>assistant".join(f" to={each}<|eom|>" for each in messages)
    calls = [ReadCall("", "f", '{"d": "1"}'), ReadCall("", "x.g", "{}")]
    for pieces in cuttings(text, 7):
        assert read(form("muse"), pieces, tools=TOOLS) == ReadOutput("Wait.", f"I call {call}", calls)


@pytest.mark.parametrize("name", ["mimo", "qwen3_coder"])
def test_a_name_that_is_not_closed_begins_no_call(name: str) -> None:
    called = "<tool_call>\n<function=g>\n</function>\n</tool_call>"
    for behind in ("</tool_call>", ""):
        output = read(form(name), [f"<tool_call>\n<function=f{behind}{called}"], tools=TOOLS)
        assert output == ReadOutput(f"<tool_call>\n<function=f{behind}", None, [ReadCall("", "g", "{}")])


def test_a_cut_call_keeps_what_came_of_its_arguments() -> None:
    [call] = read(form("hermes"), ['<tool_call>{"name": "f", "arguments": {"a": "x']).calls
    assert call == ReadCall("", "f", '{"a": "x')
    [call] = read(form("qwen3_coder"), ["<tool_call><function=f><parameter=d>\nx\n"], tools=TOOLS).calls
    assert call == ReadCall("", "f", '{"d": "x')


@pytest.mark.parametrize("name", list(TEXTS))
def test_hostile_text_takes_a_bounded_number_of_looks_at_each_character(name: str) -> None:
    calls = form(name).calls
    assert calls is not None
    mark = calls.opens[0].pieces[0].literal
    bodies = ("<" * 1200, mark[:-1] * 200, mark * 80, mark + " " * 1200, mark + '{"name": ' * 300, mark + "[" * 1200)
    for text in (*bodies, mark + "f" * 1200, mark + '{"name": "f", "arguments": {"a": "' + "\\" * 1200):
        parser = OutputParser(form(name), TOOLS)
        num_chars = 0
        for char in text:
            parser.feed(char)
            num_chars += len(parser._source.text)
        parser.feed("", is_last=True)
        assert num_chars <= 150 * len(text)


def test_the_checkpoints_own_template_wins() -> None:
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": ["<|im_start|>assistant\n", "<|im_end|>\n"],
        "fields": {
            "thinking": {"open": "<t>", "close": "</t>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"<call:(?P<name>\w+)>\s*",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": "<|im_end|>"},
        },
    }
    assert format_of('<tool_call> "arguments"', None, "hf", "hf") is None
    assert format_of("", template, "hf", "hf") == format_of("", template)
    found = format_of('<tool_call> "arguments" </think>', template)
    text = '<t>why</t>\n\nHi <call:a-b.c>\n{"x": 1}\n</call><|im_end|>'
    for pieces in cuttings(text):
        assert read(found, pieces) == ReadOutput("Hi", "why", [ReadCall("", "a-b.c", '{"x": 1}')])


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_calls": {"open_pattern": "<a(b|c)>", "close": "</a>", "content": "json"}},
        {"tool_calls": {"open": "<a>", "close": "</a>", "content": "kv-lines"}},
        {"thinking": {"open": "<think>"}},
        {"thinking": 5},
    ],
)
def test_unusable_templates_are_logged_and_ours_taken(fields: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    found = format_of('<tool_call> "arguments" </think>', {"fields": fields})
    assert found is not None
    assert found.name == "hermes+think"
    assert "the response_template of tokenizer_config.json is not used" in caplog.text


def test_formats_are_chosen_by_name_or_by_the_chat_template() -> None:
    def names(template: str, **parsers: str) -> str | None:
        found = format_of(template, None, **parsers)
        return None if found is None else found.name

    assert names("plain") is None
    assert names('<tool_call> <function= <parameter= "arguments"') == "qwen3_coder"
    assert names("[TOOL_CALLS]") == "mistral"
    assert names("[TOOL_CALLS] [ARGS]", tool_call_parser="mistral") == "mistral_args"
    assert names("[TOOL_CALLS]", tool_call_parser="hermes", reasoning_parser="deepseek_r1") == "hermes+think"
    assert names("</think> [TOOL_CALLS]", tool_call_parser="none", reasoning_parser="none") is None
    for name in ("hermes", "llama3_json", "mistral", "pythonic", "deepseek_v3", "qwen3_coder", "glm45", "openai"):
        assert names("", tool_call_parser=name, reasoning_parser="none") is not None
    with pytest.raises(ConfigError, match="tool_call_parser is 'hermse'.*hermes"):
        names("", tool_call_parser="hermse")
    with pytest.raises(ConfigError, match="'beam', octavo calls it hf"):
        names("", tool_call_parser="beam")
    with pytest.raises(ConfigError, match="reasoning_parser is 'hermes'"):
        names("", reasoning_parser="hermes")
