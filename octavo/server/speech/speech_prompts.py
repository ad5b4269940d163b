"""The prompt with which each family that reads sounds in place of tokens transcribes one, and the form of its
answer."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from octavo.config.media.media_families import media_family
from octavo.core.prompt import Prompt
from octavo.engine.text.chat_template import ChatOptions
from octavo.errors import InvalidRequest
from octavo.multimodal.processors.waveform import Waveform
from octavo.multimodal.sound import MAX_SECONDS, Samples

if TYPE_CHECKING:
    from octavo.engine.input.input_processor import InputProcessor
    from octavo.server.schema.audio import TranscriptionRequest

Task = Literal["transcribe", "translate"]


class Asked(NamedTuple):
    """A client's request about a sound (its samples and their rate)."""

    form: TranscriptionRequest
    task: Task
    sound: tuple[Samples, int]


class SpeechStyle(NamedTuple):
    """write: makes the prompt for a sound. marks: tokens that a tokenizer of the family has. takes: the fields among
    language, prompt and hotwords that it reads. piece_s: seconds of the longest sound that the family was trained on.
    behind_language: separator between the language and the text, for a model that writes the language. tokens_per_s:
    most tokens per second of speech, as beyond it the model repeats itself; None: no limit."""

    write: Callable[[InputProcessor, Asked], Prompt]
    marks: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    piece_s: float = MAX_SECONDS
    tasks: frozenset[Task] = frozenset({"transcribe"})
    behind_language: str = ""
    tokens_per_s: float | None = None

    def prompt(self, tools: InputProcessor, asked: Asked) -> Prompt:
        """Return the prompt for a sound. Raises InvalidRequest."""
        for name in ("prompt", "hotwords"):
            if name not in self.takes and getattr(asked.form, name):
                raise no_text_before(name)
        if "language" not in self.takes and asked.form.language is not None:
            raise InvalidRequest("language is set, and this model hears it by itself; leave it out", field="language")
        return self.write(tools, asked)

    def split(self, written: str) -> tuple[str | None, str] | None:
        """Return the code of the language (None for an unknown one) and the text so far; None while it is undecided
        whether language or text comes."""
        head, mark, text = written.partition(self.behind_language) if self.behind_language else ("", "", written)
        if mark and len(head) <= _LONGEST_HEAD:
            return _CODES.get(head.strip().removeprefix("language ").lower()), text
        if self.behind_language and len(written) <= _LONGEST_HEAD + len(self.behind_language):
            return None
        return None, written


def style_of(tools: InputProcessor) -> SpeechStyle | None:
    """Return the style of a model; None if the model transcribes no speech from prompts."""
    style = None if tools.media.hearing is None else STYLES.get(media_family(tools.media.hearing.architecture).speech)
    return None if style is None or any(tools.tokenizer.token_id(each) is None for each in style.marks) else style


def gap(before: str, after: str) -> str:
    """Return the separator of two texts: a space, or "" for scripts that are written without spaces."""
    return "" if not before or not after or _is_unspaced(before[-1]) or _is_unspaced(after[0]) else " "


def _is_unspaced(char: str) -> bool:
    return unicodedata.east_asian_width(char) in "WF" and not unicodedata.name(char, "").startswith("HANGUL")


def _voxtral(tools: InputProcessor, asked: Asked) -> Prompt:
    """The language, where one is given, stands before the last token."""
    language = None if asked.form.language is None else asked.form.language.lower()
    if language is not None and not (len(language) == 2 and language.isascii() and language.isalpha()):
        raise InvalidRequest(f"language is {language!r}, expected a code of two letters such as en", field="language")
    *before, mark = (tools.tokenizer.token_id(each) or 0 for each in _VOXTRAL_MARKS)
    stated = tools.tokenizer.encode(f"lang:{language}", add_special_tokens=False) if language else []
    return Prompt(token_ids=[*before, *stated, mark], multi_modal_data={"audio": asked.sound})


def _qwen3_asr(tools: InputProcessor, asked: Asked) -> Prompt:
    """The text of the request is the system's message; the answer begins with the language, where one is given."""
    language = _named_language(asked.form.language)
    content: list[Mapping[str, object]] = [{"type": "audio", "audio": asked.sound}]
    messages = [{"role": "user", "content": content}]
    if words := " ".join(filter(None, (asked.form.hotwords, asked.form.prompt))):
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": words}]})
    prompt = tools.render_chat(messages)
    begun = f"language {language}{_ASR_TEXT}" if language else ""
    return msgspec.structs.replace(prompt, text=f"{prompt.text}{begun}")


def _granite(tools: InputProcessor, asked: Asked) -> Prompt:
    """The words of the task stand behind the sound."""
    assert tools.media.sounds is not None, "a model without sounds has no style"
    content = f"{tools.tokenizer.token_text(tools.media.sounds.marker)}{_in_words(asked, _GRANITE_WORDS)}"
    prompt = tools.render_chat(
        [{"role": "user", "content": content}], ChatOptions(allow_special_tokens_in_content=True)
    )
    return msgspec.structs.replace(prompt, multi_modal_data={"audio": [asked.sound]})


def _moonshine(tools: InputProcessor, asked: Asked) -> Prompt:
    """The sound is read beside the first token, and each model knows one language."""
    assert isinstance(tools.media.hearing, Waveform), "the style of a model that reads samples"
    return Prompt(token_ids=[tools.media.hearing.start], multi_modal_data={"audio": asked.sound})


def _cohere(tools: InputProcessor, asked: Asked) -> Prompt:
    """The language, by default English, stands among the tokens before the text, which has punctuation."""
    language = _named_language(asked.form.language or "en", known=_COHERE_LANGUAGES)
    marks = (*_COHERE_MARKS[:4], *[f"<|{language}|>"] * 2, *_COHERE_MARKS[4:])
    token_ids = [tools.tokenizer.token_id(each) or 0 for each in marks]
    return Prompt(token_ids=token_ids, multi_modal_data={"audio": asked.sound})


def _fun_asr(tools: InputProcessor, asked: Asked) -> Prompt:
    """The prompt of Fun-ASR's own code: terms to expect, then the task with the language of the text."""
    words, name = asked.form.hotwords or "", _named_language(asked.form.language, known=_FUN_ASR_LANGUAGES)
    if "<|" in words:
        raise InvalidRequest("hotwords has <|, with which special tokens begin; leave it out", field="hotwords")
    assert tools.media.sounds is not None, "a model without sounds has no style"
    sound = tools.tokenizer.token_text(tools.media.sounds.marker)
    task = f"{_FUN_ASR_TERMS.format(words) if words else ''}语音转写{f'成{name}' if name else ''}：{sound}"
    return Prompt(text=_CHATML.format(task), multi_modal_data={"audio": [asked.sound]})


def _behind(tools: InputProcessor, asked: Asked, words: Mapping[Task, str]) -> Prompt:
    """The words of the task stand behind the sound, as the template of chats has them."""
    text = {"type": "text", "text": _in_words(asked, words)}
    return tools.render_chat([{"role": "user", "content": [{"type": "audio", "audio": asked.sound}, text]}])


def _omni(tools: InputProcessor, asked: Asked) -> Prompt:
    """The task in words stands behind the sound, with the language of the text."""
    language = _named_language(asked.form.language)
    if asked.task == "translate":
        words = f"Translate this audio{f' from {language}' if language else ''} into {_target(asked.form)}."
    else:
        words = f"Transcribe this audio{f' into {language}' if language else ''}."
    content = [{"type": "audio", "audio": asked.sound}, {"type": "text", "text": words}]
    return tools.render_chat([{"role": "user", "content": content}])


def _in_words(asked: Asked, words: Mapping[Task, str]) -> str:
    """Return the task in words of a family, with the language of a translation."""
    return words[asked.task].format(language=_target(asked.form))


def _target(form: TranscriptionRequest) -> str:
    """Return the name of the language of a translation. Raises InvalidRequest."""
    return _named_language(form.to_language, "to_language") or "English"


def _named_language(given: str | None, field: str = "language", known: Mapping[str, str] | None = None) -> str | None:
    """Return the name of a language by its code, by default that of Qwen. Raises InvalidRequest about `field`."""
    names = _LANGUAGES if known is None else known
    language = None if given is None else names.get(given.lower())
    if given is not None and language is None:
        raise InvalidRequest(f"{field} is {given!r}, expected one of {', '.join(sorted(names))}", field=field)
    return language


def no_text_before(field: str) -> InvalidRequest:
    """Return the error for a text in this field that the model does not read."""
    return InvalidRequest(f"{field} is set, and this model reads no text before a sound; leave it out", field=field)


_LONGEST_HEAD: Final = 40
"""Most characters before the text, among which a language is looked for."""
_GRANITE_WORDS: Final[Mapping[Task, str]] = {
    "transcribe": "can you transcribe the speech into a written format?",
    "translate": "translate the speech to {language}",
}
_GLM_WORDS: Final[Mapping[Task, str]] = {"transcribe": "Please transcribe this audio into text"}
_PHI4_WORDS: Final[Mapping[Task, str]] = {
    "transcribe": "Transcribe the audio clip into text.",
    "translate": "Translate the audio to {language}.",
}
_ASR_TEXT: Final = "<asr_text>"
_VOXTRAL_MARKS: Final = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]", "[TRANSCRIBE]")
_SYSTEM: Final = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
_CHATML: Final = f"{_SYSTEM}<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"
_FUN_ASR_LANGUAGES: Final = {"en": "英文", "ja": "日文", "zh": "中文"}
_FUN_ASR_TERMS: Final = (
    "请结合上下文信息，更加准确地完成语音转写任务。如果没有相关信息，我们会留空。"
    "\n\n\n**上下文信息：**\n\n\n热词列表：[{}]\n"
)
_COHERE_LANGUAGES: Final = {
    each: each for each in ("ar", "de", "el", "en", "es", "fr", "it", "ja", "ko", "nl", "pl", "pt", "vi", "zh")
}
_COHERE_MARKS: Final = (
    *("\u2581", "<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>"),
    *("<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>"),
)
"""Tokens before the text; the language is inserted twice after the fourth."""
_LANGUAGES: Final = {
    "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English", "es": "Spanish",
    "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French", "hi": "Hindi", "hu": "Hungarian",
    "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay",
    "nl": "Dutch", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish",
    "th": "Thai", "tr": "Turkish", "vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese",
}  # fmt: skip
"""Names by which models of Qwen know languages."""
_CODES: Final = {name.lower(): code for code, name in _LANGUAGES.items()}

_LANGUAGE: Final = ("language",)
STYLES: Final[Mapping[str, SpeechStyle]] = {
    "cohere": SpeechStyle(_cohere, (*_COHERE_MARKS, "<|en|>"), _LANGUAGE, piece_s=35.0),
    "fun_asr": SpeechStyle(_fun_asr, ("<|im_start|>",), ("language", "hotwords"), 30.0),
    "glm": SpeechStyle(partial(_behind, words=_GLM_WORDS), piece_s=655.0),
    "granite": SpeechStyle(_granite, piece_s=30.0, tasks=frozenset(_GRANITE_WORDS)),
    "moonshine": SpeechStyle(_moonshine, piece_s=30.0, tokens_per_s=13.0),
    "omni": SpeechStyle(_omni, takes=_LANGUAGE, piece_s=30.0, tasks=frozenset({"transcribe", "translate"})),
    "phi4": SpeechStyle(partial(_behind, words=_PHI4_WORDS), piece_s=40.0, tasks=frozenset(_PHI4_WORDS)),
    "qwen3_asr": SpeechStyle(
        _qwen3_asr, (_ASR_TEXT,), ("language", "prompt", "hotwords"), 1200.0, behind_language=_ASR_TEXT
    ),
    "voxtral": SpeechStyle(_voxtral, _VOXTRAL_MARKS, _LANGUAGE),
}
"""By `speech` of a `MediaFamily`."""
