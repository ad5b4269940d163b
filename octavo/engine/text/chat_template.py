"""Renders chat messages as the text that a model was trained on, with the Jinja template of its checkpoint.

Templates come from the internet: they run in a sandbox, with a budget; what they raise is an error of the request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from octavo.config.checkpoint import CONFIG
from octavo.config.media.media_families import media_family
from octavo.config.section import read_json_object
from octavo.core.request_options import BatchKeywords
from octavo.engine.text.template_budget import RenderLimitReached, RenderLimits
from octavo.engine.text.tokenizer import TOKENIZER_CONFIG, Tokenizer
from octavo.errors import CheckpointError, InvalidRequest
from octavo.gguf.reader import is_gguf

if TYPE_CHECKING:
    import jinja2

    from octavo.engine.text.template_sandbox import TemplateSandbox

TEMPLATE_FILE: Final = "chat_template.jinja"
_PLAIN: Final = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ '' if loop.last else '\n' }}{% endfor %}"
_OF_PLAIN_PROMPTS: Final = ("DeepseekOCR", "DeepseekOcr2", "PaliGemma")
"""Beginnings of architectures that were trained with prompts of images and a text."""
_LONGEST_QUOTE: Final = 500

_log = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""One message: `role`, and `content` as text or as a list of parts `{"type": "text", "text": …}`."""


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a conversation becomes a prompt.

    add_generation_prompt: end with what opens the assistant's turn. continue_final_message: end inside the last
    message, so that the model goes on with it. chat_template: a template instead of the model's. tools: what the model
    may call, each `{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`.
    chat_template_kwargs: further values that the template may use. allow_special_tokens_in_content: a special token
    that a message spells becomes that token; by default only those that the template writes do.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    allow_special_tokens_in_content: bool = False


class ChatKeywords(BatchKeywords, total=False):
    """The fields of `ChatOptions` as keywords, beside those of the requests that the conversations become."""

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    allow_special_tokens_in_content: bool


class ChatTemplate:
    """A template and the special tokens that it may name. It is compiled once, when it is first used.

    name: what errors call it, such as the file that it comes from; clients of a server see it, so that it has no path.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, name: str = "the chat template"
    ) -> None:
        self.source = source
        self.name = name
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def find(cls, directory: str | Path, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate | None:
        """Return `override`, else the directory's chat_template.jinja, else the template of chat_template.json, which
        older processors of images and sounds have, else that of tokenizer_config.json, else one that writes the texts
        alone, for models of images whose releases have none."""
        for name, source in _templates_of(Path(directory), tokenizer, override):
            if source is not None:
                return cls(source, tokenizer.special_tokens, name)
        return None

    def render(
        self,
        messages: Sequence[Message],
        options: ChatOptions | None = None,
        limits: RenderLimits | None = None,
        stand_ins: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Return the text of a conversation.

        limits: what the rendering may cost. stand_ins: what stands for an image or a sound (audio) where the
        template knows none. Raises InvalidRequest, which names the message or has what the template complains about,
        and TemplateTooExpensive.
        """
        import jinja2

        options = options or ChatOptions()
        if options.add_generation_prompt and options.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message cannot both be true: the text either opens a new "
                "message or goes on with the last one",
                field="continue_final_message",
            )
        if isinstance(self._compiled, str):
            raise InvalidRequest(self._compiled, field="chat_template")
        template, wants_parts = self._compiled
        if unknown := {kind: text for kind, text in stand_ins.items() if kind not in self.source}:
            messages = [_with_text(message, unknown) for message in _some(messages)]
        normal = [_normal_message(index, message, wants_parts) for index, message in enumerate(_some(messages))]
        values = {**self._special_tokens, **(options.chat_template_kwargs or {})}
        values |= {"messages": normal, "add_generation_prompt": options.add_generation_prompt}
        if options.tools is not None:
            values["tools"] = [*options.tools]
        values.setdefault("tools", None)
        values.setdefault("documents", None)
        budget = self._sandbox.begin(limits or RenderLimits())
        try:
            text = template.render(values)
            budget.take(len(text))
        except RenderLimitReached as error:
            raise TemplateTooExpensive(
                f"{self.name} does not render these messages: {error}; shorten the messages, or give another template "
                "with the argument chat_template",
                field="messages",
            ) from error
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"{self.name} refuses these messages: {_short(error)}", field="messages") from error
        except (
            *(TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
            *(RecursionError, MemoryError),
        ) as error:
            raise InvalidRequest(
                f"{self.name} cannot render these messages ({type(error).__name__}: {_short(error)})", field="messages"
            ) from error
        return _cut_after_final(text, normal[-1]) if options.continue_final_message else text

    def compile(self) -> None:
        """Compile the template before its first use. One that is not valid is logged; its uses raise."""
        if isinstance(self._compiled, str):
            _log.warning("no chats: %s", self._compiled)

    @cached_property
    def _sandbox(self) -> TemplateSandbox:
        from octavo.engine.text.template_sandbox import TemplateSandbox

        return TemplateSandbox()

    @cached_property
    def _compiled(self) -> tuple[jinja2.Template, bool] | str:
        """The template, and whether it loops over the parts of a content without accepting plain text; or why the
        source is not valid, so that it is parsed only once."""
        import jinja2

        try:
            wants_parts = "content" in self.source and _loops_over_parts(self._sandbox.parse(self.source))
            return self._sandbox.compiled(self.source), wants_parts
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {_short(error.message)}"
        except (RecursionError, MemoryError, SyntaxError) as error:
            where = f"it nests too deeply: {type(error).__name__}"
        except ValueError as error:  # a number with too many digits
            where = _short(error)
        return f"{self.name} is not valid Jinja ({where}); give another one with the argument chat_template"


class TemplateTooExpensive(InvalidRequest):
    """A rendering has reached its limits."""

    code = "template_too_expensive"


def _short(message: object) -> str:
    """Return the beginning of a template's message."""
    text = str(message)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"


def _templates_of(path: Path, tokenizer: Tokenizer, override: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield what may be the template, the preferred one first, each with its name."""
    yield "the chat template of the argument chat_template", override
    file = (path.parent if path.is_file() else path) / TEMPLATE_FILE
    if file.is_file() and not is_gguf(path):
        try:
            yield f"the chat template of {file.name}", file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error})") from error
    if (older := file.with_suffix(".json")).is_file() and not is_gguf(path):
        yield f"chat_template of {older.name}", _configured_template(read_json_object(older).get("chat_template"))
    yield f"chat_template of {TOKENIZER_CONFIG}", _configured_template(tokenizer.config.get("chat_template"))
    yield "the chat template for a model without one", _plain_template(file.with_name(CONFIG))


def _plain_template(config: Path) -> str | None:
    """Return the template of a model whose prompts are texts and images alone; None for any other."""
    names = read_json_object(config).get("architectures") if config.is_file() else None
    first = str([*names, ""][0]) if isinstance(names, list) else ""
    if media_family(first).is_dual:  # whose texts have an end, too
        return f"{_PLAIN}{{{{ eos_token }}}}"
    return _PLAIN if first.startswith(_OF_PLAIN_PROMPTS) else None


def no_template() -> InvalidRequest:
    """Return the error of a model that has no chat template."""
    return InvalidRequest(
        "this model has no chat template, so messages cannot be turned into a prompt; start octavo with the argument "
        "chat_template, or send plain prompts (completions, LLM.generate)",
        field="messages",
    )


def _configured_template(value: Any) -> str | None:
    """Return tokenizer_config.json's `chat_template`: a template, or the one named `default` of a list."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        template = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
        return template if isinstance(template, str) else None
    return None


def _some(messages: Sequence[Message]) -> Sequence[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest(
            f"messages is {'text' if isinstance(messages, str) else 'empty or no list'}; expected a list of at least "
            'one {"role": …, "content": …}',
            field="messages",
        )
    return messages


def _normal_message(index: int, message: Any, wants_parts: bool) -> dict[str, Any]:
    """Return a message whose content has the form that the template reads; other keys stay."""
    field = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"{field} is {type(message).__name__}, expected an object with role and content", field=field
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(
            f"{field}.role is {role!r}, expected a name such as system, user or assistant", field=f"{field}.role"
        )
    normal = dict(message)
    content = message.get("content")
    if isinstance(content, str):
        normal["content"] = [{"type": "text", "text": content}] if wants_parts else content
    elif content is None:
        normal["content"] = None if wants_parts else ""
    else:
        parts = _parts(content, f"{field}.content")
        if wants_parts or any(part["type"] != "text" for part in parts):
            normal["content"] = parts
        else:
            normal["content"] = "\n".join(part["text"] for part in parts)
    return normal


def _with_text(message: Any, stand_ins: Mapping[str, str]) -> Any:
    """Return a message in which text stands for images, and at the beginning of the text behind them for sounds."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for part in content:
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        if kind in stand_ins and part == {"type": kind}:
            parts.append({"type": "text", "text": stand_ins[kind]})
        elif kind == "text" and "audio" in stand_ins and parts and parts[-1] == {**part, "text": stand_ins["audio"]}:
            parts[-1] = {**part, "text": f"{stand_ins['audio']}{part.get('text')}"}
        else:
            parts.append(part)
    return {**message, "content": parts}


def _parts(content: Any, field: str) -> list[dict[str, str]]:
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"{field} is {type(content).__name__}, expected text or a list of parts", field=field)
    parts: list[dict[str, str]] = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        if part in ({"type": "image"}, {"type": "video"}, {"type": "audio"}):
            parts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"{field}[{number}] has the type {kind!r}; this model reads text parts only: "
                '{"type": "text", "text": …}',
                field=f"{field}[{number}]",
            )
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _loops_over_parts(tree: Any) -> bool:
    """Return whether a template loops over the parts of a content without accepting plain text."""
    from jinja2 import nodes

    over_content = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
    accepts_text = any(test.name == "string" and _is_content(test.node) for test in tree.find_all(nodes.Test))
    return over_content and not accepts_text


def _is_content(node: Any) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _cut_after_final(text: str, message: Message) -> str:
    """Return the text up to the end of its last message, without what closes it."""
    content = message.get("content")
    final = content[-1]["text"] if isinstance(content, list) and content else content
    if not isinstance(final, str) or not final.strip() or final.strip() not in text:
        raise InvalidRequest(
            "continue_final_message needs a last message whose text the chat template keeps as it is; its content is "
            "empty or was changed",
            field="continue_final_message",
        )
    start = text.rindex(final.strip())
    kept = final.lstrip()
    return text[: start + len(kept if text.startswith(kept, start) else final.strip())]
