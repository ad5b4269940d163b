"""The events of the WebSocket `/v1/realtime`: vLLM's, and those of OpenAI's transcription sessions."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.core.request_limits import check_field
from octavo.server.decode import Refused, RequestBody, refuse_unsupported
from octavo.server.errors import ErrorObject

_VLLM_RATE: Final = 16_000
_OPENAI_RATE: Final = 24_000


class PcmFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """16-bit samples, little-endian, one channel. rate: samples per second."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Annotated[int, Meta(ge=8_000, le=48_000)] = _OPENAI_RATE


class SpeechModel(Struct, frozen=True, forbid_unknown_fields=True):
    """The model and its parameters, by the fields of `/v1/audio/transcriptions`."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    delay: Annotated[Any, Refused("a sound is written down when it is committed")] = None


class SessionInput(Struct, frozen=True, forbid_unknown_fields=True):
    """The format of the sound, and the parameters of the model."""

    format: PcmFormat | None = None
    transcription: SpeechModel | None = None
    turn_detection: Annotated[Any, Refused("send input_audio_buffer.commit at the end of each turn")] = None
    noise_reduction: Annotated[Any, Refused("sounds are read as they are")] = None


class SessionAudio(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a session that are about sound."""

    input: SessionInput = SessionInput()


class Session(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a session of OpenAI's API."""

    type: Literal["transcription"] = "transcription"
    audio: SessionAudio = SessionAudio()
    include: Annotated[Any, Refused("deltas have text alone", harmless=([],))] = None


class ClientEvent(RequestBody, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    """The fields that each event may have. event_id: chosen by the client."""

    event_id: str | None = None


class SessionUpdate(ClientEvent, tag="session.update"):
    """Settings of the next utterances, in the fields of vLLM, or as a session of OpenAI's API."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    temperature: float | None = None
    session: Session | None = None

    def check(self) -> None:
        """Raise InvalidRequest for fields that are too long or not supported."""
        RequestBody.check(self)
        if self.session is None:
            return
        refuse_unsupported(self.session, "session.")
        refuse_unsupported(self._input, "session.audio.input.")
        check_field("prompt", self._asked.prompt or "", "session.audio.input.transcription.prompt")
        refuse_unsupported(self._asked, "session.audio.input.transcription.")

    @property
    def _input(self) -> SessionInput:
        return SessionInput() if self.session is None else self.session.audio.input

    @property
    def _asked(self) -> SpeechModel:
        return self._input.transcription or SpeechModel()

    def form(self) -> dict[str, str]:
        """Return the fields of `/v1/audio/transcriptions` that are given."""
        asked = self._asked
        given = {
            "model": asked.model or self.model,
            "language": asked.language or self.language,
            "prompt": asked.prompt or self.prompt,
            "temperature": self.temperature,
        }
        return {name: str(value) for name, value in given.items() if value is not None}

    @property
    def model_field(self) -> str:
        """Return the field that names the model."""
        return "session.audio.input.transcription.model" if self._asked.model else "model"

    def rate(self) -> int:
        """Return the samples per second."""
        if self.session is None:
            return _VLLM_RATE
        return (self._input.format or PcmFormat()).rate


class Append(ClientEvent, tag="input_audio_buffer.append"):
    """More of an utterance. audio: samples of 16 bits, in base64."""

    audio: bytes


class Commit(ClientEvent, tag="input_audio_buffer.commit"):
    """The end of an utterance. final: an answer is sent even if nothing was appended."""

    final: bool = False


class Clear(ClientEvent, tag="input_audio_buffer.clear"):
    """Forgets what was appended since the last commit."""


Event = SessionUpdate | Append | Commit | Clear


class SpokenEvent(Struct, frozen=True):
    """The fields of a streamed transcription's event, or of its error, that are sent on."""

    type: str = ""
    delta: str = ""
    text: str = ""
    usage: dict[str, Any] | UnsetType = UNSET
    error: ErrorObject | UnsetType = UNSET


class VllmWords:
    """Events in the form of vLLM."""

    rate = _VLLM_RATE
    says_more = False
    """Whether settings, commits and clears are answered."""

    def created(self, session_id: str, created: int) -> dict[str, Any]:
        return {"type": "session.created", "id": session_id, "created": created}

    def delta(self, item: str, text: str) -> dict[str, Any]:
        return {"type": "transcription.delta", "delta": text}

    def done(self, item: str, text: str, num_in: int, num_out: int) -> dict[str, Any]:
        usage = {"prompt_tokens": num_in, "completion_tokens": num_out, "total_tokens": num_in + num_out}
        return {"type": "transcription.done", "text": text, "usage": usage}

    def error(self, error: ErrorObject) -> dict[str, Any]:
        return {"type": "error", "error": error.message, "code": error.code, "param": error.param}

    def failed(self, item: str, error: ErrorObject) -> dict[str, Any]:
        return self.error(error)


class OpenAIWords:
    """Events in the form of OpenAI's transcription sessions."""

    rate = _OPENAI_RATE
    says_more = True
    _about: Final = "conversation.item.input_audio_transcription"

    def created(self, session_id: str, created: int) -> dict[str, Any]:
        return {"type": "session.created", "session": {"type": "transcription", "id": session_id}}

    def delta(self, item: str, text: str) -> dict[str, Any]:
        return {"type": f"{self._about}.delta", "item_id": item, "content_index": 0, "delta": text}

    def done(self, item: str, text: str, num_in: int, num_out: int) -> dict[str, Any]:
        total = num_in + num_out
        usage = {"type": "tokens", "input_tokens": num_in, "output_tokens": num_out, "total_tokens": total}
        return {
            "type": f"{self._about}.completed", "item_id": item, "content_index": 0, "transcript": text, "usage": usage,
        }  # fmt: skip

    def error(self, error: ErrorObject) -> dict[str, Any]:
        return {"type": "error", "error": error}

    def failed(self, item: str, error: ErrorObject) -> dict[str, Any]:
        return {"type": f"{self._about}.failed", "item_id": item, "content_index": 0, "error": error}
