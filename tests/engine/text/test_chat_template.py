"""Chat templates: what checkpoints' templates rely on, and what a request may do wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.text.chat_template import ChatOptions, ChatTemplate
from octavo.engine.text.template_sandbox import TemplateSandbox
from octavo.errors import InvalidRequest
from tests.fakes.byte_tokenizer import byte_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
ANSWERED = [*HELLO, {"role": "assistant", "content": "well, "}]


def render(source: str, messages: Any = HELLO, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, ChatOptions(**options))


def test_template_sees_messages_special_tokens_and_the_wish_for_an_answer(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    template = ChatTemplate.find(tmp_path, tokenizer)
    assert template is not None
    assert template.render(HELLO) == "<bos>[user]hello<eos>[assistant]"
    assert template.render(HELLO, ChatOptions(add_generation_prompt=False)) == "<bos>[user]hello<eos>"


def test_override_goes_before_the_file_and_the_file_before_the_config(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, chat_template="config")
    sources = [ChatTemplate.find(tmp_path, tokenizer)]
    (tmp_path / "chat_template.jinja").write_text("file")
    sources += [ChatTemplate.find(tmp_path, tokenizer), ChatTemplate.find(tmp_path, tokenizer, "override")]
    assert [template and template.source for template in sources] == ["config", "file", "override"]


def test_template_sees_tools_and_calls_with_their_arguments() -> None:
    source = "{{ tools[0].function.name if tools else 'none' }}{{ messages[-1].tool_calls[0].function.arguments.x }}"
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert render(source, messages, tools=tools) == "f1"
    assert render(source, messages) == "none1"


def test_default_is_taken_of_several_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    template = ChatTemplate.find(tmp_path, byte_tokenizer(tmp_path, chat_template=named))
    assert template is not None
    assert template.source == "plain"


@pytest.mark.parametrize("name", ["DeepseekOCRForCausalLM", "PaliGemmaForConditionalGeneration"])
def test_models_of_images_without_a_template_get_the_texts_behind_their_images(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    template = ChatTemplate.find(tmp_path, byte_tokenizer(tmp_path, chat_template=None))
    assert template is not None
    parts = [{"type": "image"}, {"type": "text", "text": "Free OCR."}]
    rendered = template.render([{"role": "user", "content": parts}], stand_ins={"image": "<image>"})
    assert rendered == "<bos><image>\nFree OCR."


def test_checkpoint_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.find(tmp_path, byte_tokenizer(tmp_path, chat_template=None)) is None


def test_blocks_leave_no_blank_lines_behind() -> None:
    assert (
        render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n") == "hello\n"
    )


def test_json_is_written_as_it_is() -> None:
    message = [{"role": "user", "content": "x", "call": {"b": "<é>", "a": 1}}]
    assert render("{{ messages[0].call | tojson }}", message) == json.dumps({"b": "<é>", "a": 1}, ensure_ascii=False)
    assert render("{{ messages[0].call | tojson(indent=1) }}", message) == '{\n "b": "<é>",\n "a": 1\n}'


def test_words_that_templates_use_are_known() -> None:
    assert render("{% generation %}a{% endgeneration %}") == "a"
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert (
        render("{% if tools %}x{% endif %}{{ enable_thinking }}", chat_template_kwargs={"enable_thinking": False})
        == "False"
    )


def test_parts_of_a_content_become_text_where_the_template_wants_text() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert render("{{ messages[0].content }}", parts) == "one\ntwo"
    either = "{% if m.content is string %}{% endif %}"
    assert render(f"{{% for m in messages %}}{either}{{{{ m.content }}}}{{% endfor %}}", parts) == "one\ntwo"


def test_text_becomes_parts_where_the_template_goes_through_parts() -> None:
    source = "{% for m in messages %}{% for part in m['content'] %}<{{ part.text }}>{% endfor %}{% endfor %}"
    assert render(source) == "<hello>"


def test_final_message_is_continued_where_it_ends() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, ANSWERED, **options) == "[user]hello<eos>[assistant]well, "
    assert render(source.replace("m.content", "m.content | trim"), ANSWERED, **options).endswith("[assistant]well,")


def test_final_message_cannot_be_continued_behind_an_opened_one() -> None:
    with pytest.raises(InvalidRequest, match="cannot both be true") as caught:
        render("x", ANSWERED, continue_final_message=True)
    assert caught.value.field == "continue_final_message"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([*HELLO, {"content": "x"}], "messages[1].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages[0].content[0]"),
    ],
)
def test_bad_messages_are_refused_by_field(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("{{ messages }}", messages)
    assert caught.value.field == field


def test_complaint_of_a_template_reaches_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="chat template"):
        render("{{ messages[5].content }}")
    with pytest.raises(InvalidRequest, match=r"cannot render these messages \(TypeError"):
        render("{{ 1 + 'a' }}")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json", "chat_template.jinja"])
def test_the_error_of_a_template_does_not_contain_the_path_of_its_checkpoint(tmp_path: Path, file: str) -> None:
    source = "{{ 1 + 'a' }}"
    tokenizer = byte_tokenizer(tmp_path, chat_template=source if file.startswith("tokenizer") else "Hello")
    if file.startswith("chat_template"):
        is_json = file.endswith(".json")
        (tmp_path / file).write_text(json.dumps({"chat_template": source}) if is_json else source)
    template = ChatTemplate.find(tmp_path, tokenizer)
    assert template is not None
    with pytest.raises(InvalidRequest) as caught:
        template.render(HELLO)
    assert f"of {file} cannot render" in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_broken_template_is_refused_with_its_line() -> None:
    with pytest.raises(InvalidRequest, match="line 2") as caught:
        render("fine\n{% if %}")
    assert caught.value.field == "chat_template"


def test_template_cannot_reach_out_of_its_sandbox() -> None:
    with pytest.raises(InvalidRequest, match="unsafe"):
        render("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InvalidRequest, match="chat template"):
        render("{{ messages.append(1) }}")


def test_a_template_that_is_not_valid_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = TemplateSandbox.parse
    monkeypatch.setattr(TemplateSandbox, "parse", lambda self, source: parsed.append(source) or parse(self, source))
    template = ChatTemplate("{% if %}")
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="is not valid Jinja"):
            template.render(HELLO)
    assert len(parsed) == 1
