"""The forms of `POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.server.decode import EngineBody, Int, Refused, RequestBody, converted
from octavo.server.multipart import Form

_OFF: Final = (False, "false", "False")
_ONE: Final = Refused("a sound has one text", harmless=(1, "1"))
_LIKELIEST: Final = Refused("sounds are written down without beam search", harmless=_OFF)

AudioFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]


class TranscriptionRequest(EngineBody, kw_only=True, forbid_unknown_fields=True):
    """The fields beside `file`: OpenAI's, and the sampling parameters and options of other requests."""

    lists_prompts = False  # but pieces of a sound

    prompt: str | None = None
    response_format: AudioFormat = "json"
    language: str | None = None
    timestamp_granularities: list[Literal["segment", "word"]] = []
    temperature: float | None = None
    stream: bool = False
    hotwords: str | None = None
    to_language: str | None = None
    stream_include_usage: bool = False
    stream_continuous_usage_stats: bool = False

    seed: Int | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None

    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    """Most tokens of each window, or piece, of the sound."""

    n: Annotated[Any, _ONE] = None
    use_beam_search: Annotated[Any, _LIKELIEST] = None
    length_penalty: Annotated[Any, _LIKELIEST] = None
    include_stop_str_in_output: Annotated[Any, Refused("no strings end a text here", harmless=_OFF)] = None
    watermarking: Annotated[Any, Refused("texts have no watermarks here", harmless=_OFF)] = None
    vllm_xargs: Annotated[Any, Refused("octavo has no such extensions")] = None
    chunking_strategy: Annotated[Any, Refused("sounds are cut where a timestamp ends", harmless=("auto",))] = None
    include: Annotated[Any, Refused("segments of verbose_json have avg_logprob")] = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that are given, without the temperature."""
        return {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}

    @property
    def is_timed(self) -> bool:
        return self.response_format in ("verbose_json", "srt", "vtt")

    def check(self) -> None:
        """Raise InvalidRequest for fields that contradict each other, or that are not supported yet."""
        RequestBody.check(self)
        if "word" in self.timestamp_granularities:
            raise InvalidRequest(
                "timestamp_granularities has word, but timestamps of single words are not supported; ask for segment",
                field="timestamp_granularities",
                code="unsupported_parameter",
            )
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise InvalidRequest(
                f"timestamp_granularities needs response_format verbose_json, but it is {self.response_format}",
                field="timestamp_granularities",
            )
        if self.stream and self.response_format not in ("json", "text"):
            raise InvalidRequest(
                f"response_format is {self.response_format}, expected json or text where stream is true",
                field="response_format",
            )
        for name in () if self.stream else ("stream_include_usage", "stream_continuous_usage_stats"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is true, but stream is false; set stream to true", field=name)
        SamplingParams(temperature=self.temperature or 0.0, **self.sampling)

    def check_task(self, task: Literal["transcribe", "translate"]) -> None:
        """Raise InvalidRequest for fields of another task."""
        if self.to_language is not None and task == "transcribe":
            raise InvalidRequest(
                f"to_language is {self.to_language!r}, but a transcription is in the language of the sound; "
                "send it to /v1/audio/translations, or leave it out",
                field="to_language",
            )


_SAMPLING = ("seed", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def of_form(form: Form) -> tuple[TranscriptionRequest, bytes]:
    """Return the fields of a form and its file. Raises InvalidRequest."""
    if set(form.files) != {"file"}:
        found = ", ".join(form.files) or "none"
        raise InvalidRequest(f"the form has the files {found}, expected one with the name file", field="file")
    values: dict[str, Any] = {}
    for name, texts in form.fields.items():
        is_list = name == "timestamp_granularities"
        if not is_list and len(texts) > 1:
            raise InvalidRequest(f"{name} comes {len(texts)} times, expected once", field=name)
        if is_list or texts[0]:  # an empty text means that the field is absent
            values[name] = texts if is_list else texts[0]
    asked = converted(values, TranscriptionRequest, strict=False)
    asked.check()
    return asked, form.files["file"]
