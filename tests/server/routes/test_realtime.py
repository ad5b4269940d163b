"""`/v1/realtime`: sounds that are written down while a client sends them."""

from __future__ import annotations

import io
import json
import ssl
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from tests.fakes.warm_server import WarmServer
from tests.fakes.whisper import make_whisper, tone
from tests.server.conftest import Served
from tests.server.http.test_encryption import make_pair
from tests.server.raw import ask, eventually
from tests.server.routes.test_audio import client_of, wav
from tests.server.routes.test_audio import hearing as hearing
from tests.server.websocket_client import WebSocketClient

Start = Callable[..., Served]

OPENAI = "/v1/realtime?intent=transcription"


def pcm(seconds: float, rate: int = 16_000) -> bytes:
    """The samples of `wav`."""
    return wav(seconds, rate)[44:]


def wav_of(samples: bytes) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.frombuffer(samples, "<i2"), 16_000, format="WAV")
    return file.getvalue()


def opened(server: Served, path: str = "/v1/realtime", **options: Any) -> WebSocketClient:
    """A session whose first event was read."""
    client = WebSocketClient(server.url, path, **options)
    assert client.status == 101, client.head
    created = client.next()
    assert created is not None
    assert created["type"] == "session.created"
    return client


def hears(served: Served, like: Served) -> Served:
    served.llm.config = like.llm.config
    return served


def test_a_client_of_vllm_gets_the_text_of_the_whole_sound(hearing: Served) -> None:
    whole = client_of(hearing.url).transcriptions.create(
        model="letters", file=("a.wav", wav(1.9)), language="fr", temperature=0.5, prompt="Hi"
    )
    asked = [(prompt.token_ids, prompt.media[0].digest) for _, prompt, _, _ in hearing.llm.requests]
    hearing.llm.requests.clear()
    with opened(hearing) as client:
        client.send(
            {"type": "session.update", "model": "letters", "language": "fr", "temperature": 0.5, "prompt": "Hi"}
        )
        client.commit()
        samples = pcm(1.9)
        for start in range(0, len(samples), 4096):
            client.append(samples[start : start + 4096])
        client.commit(final=True)
        events: list[Any] = [client.next()]
        while events[-1]["type"] == "transcription.delta":
            events.append(client.next())
    done = events.pop()
    assert (done["type"], done["text"]) == ("transcription.done", whole.text)
    assert len(events) > 1
    assert "".join(each["delta"] for each in events).strip() == whole.text
    usage = done["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    assert [(prompt.token_ids, prompt.media[0].digest) for _, prompt, _, _ in hearing.llm.requests] == asked


def test_text_is_sent_in_each_pause_while_the_client_continues_to_speak(hearing: Served) -> None:
    parts = [pcm(5.2) + bytes(2 * 8_000), pcm(5.1) + bytes(2 * 8_000), pcm(0.7)]
    texts = []
    for part in parts:
        file = ("a.wav", wav_of(part))
        texts.append(client_of(hearing.url).transcriptions.create(model="letters", file=file, temperature=0.5).text)
    hearing.llm.requests.clear()
    with opened(hearing) as client:
        client.send({"type": "session.update", "temperature": 0.5})
        client.commit()
        said = ""
        for number, part in enumerate(parts[:2], 1):
            for start in range(0, len(part), 6400):
                client.append(part[start : start + 6400])
            while said.strip() != " ".join(texts[:number]):
                event = client.next() or {}
                assert event["type"] == "transcription.delta"
                said += event["delta"]
        client.append(parts[2])
        client.commit(final=True)
        assert client.until("transcription.done")[-1]["text"] == " ".join(texts)
        client.append(parts[0] + parts[1])
        client.commit()
        assert len(client.until("transcription.done")) == 1
    ids = {request_id.split("-item-")[1].split("-")[0] for request_id, *_ in hearing.llm.requests}
    assert ids == {"1", "1.2", "1.3", "2"}


def test_utterances_get_longer_where_the_model_is_slower_than_its_client(hearing: Served) -> None:
    hearing.llm.hold_after = 1
    with opened(hearing) as client:
        client.commit()
        for _ in range(8):
            client.append(pcm(5.2) + bytes(2 * 6_400))
        client.send({"type": "wrong"})
        assert (client.next() or {})["code"] == "unknown_event"
        ids = {request_id.split("-item-")[1].split("-")[0] for request_id, *_ in hearing.llm.requests}
        assert ids <= {"1", "1.2", "1.3"}  # and one that is appended to


def test_a_turn_that_ends_in_a_pause_is_answered(hearing: Served) -> None:
    with opened(hearing) as client:
        client.commit()
        client.append(pcm(5.2) + bytes(2 * 6_400))
        assert (client.next() or {})["type"] == "transcription.delta"
        client.commit(final=True)
        assert len(client.until("transcription.done")) == 1
        client.send({"type": "session.update", "language": "xx"})
        client.commit()
        client.append((pcm(5.2) + bytes(2 * 6_400)) * 3)
        client.commit(final=True)
        assert "expected one of en, fr" in (client.next() or {})["error"]
        client.send({"type": "session.update"})
        client.append(pcm(0.1))
        client.commit(final=True)
        assert len(client.until("transcription.done")) == 1  # and no other error of the turn that has failed


def test_a_client_of_openai_gets_its_events(hearing: Served) -> None:
    text = client_of(hearing.url).transcriptions.create(model="letters", file=("a.wav", wav(0.5, 24_000))).text
    transcription = {"model": "letters"}
    session = {"type": "transcription", "audio": {"input": {"transcription": transcription, "turn_detection": None}}}
    with opened(hearing, OPENAI) as client:
        client.send({"type": "session.update", "session": session})
        client.append(pcm(0.5, 24_000))
        client.commit()
        updated, committed, done = client.until("conversation.item.input_audio_transcription.completed")
        assert updated["session"]["audio"]["input"]["transcription"]["model"] == "letters"
        assert (committed["type"], committed["item_id"]) == ("input_audio_buffer.committed", done["item_id"])
        assert (done["transcript"], done["usage"]["type"]) == (text, "tokens")
        client.commit()
        assert (client.next() or {})["error"]["code"] == "input_audio_buffer_commit_empty"
        client.send({"type": "input_audio_buffer.clear"})
        assert client.next() == {"type": "input_audio_buffer.cleared"}
        client.append(b"")
        client.commit()
        *_, failed = client.until("conversation.item.input_audio_transcription.failed")
        assert (failed["item_id"], "no samples" in failed["error"]["message"]) == ("item-2", True)


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager")  # which the client of OpenAI does not
def test_the_client_of_openai_connects(hearing: Served) -> None:
    client = openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0)
    with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        session: Any = {"type": "transcription", "audio": {"input": {"transcription": {"model": "letters"}}}}
        connection.session.update(session=session)
        connection.input_audio_buffer.append(audio=b64encode(pcm(0.5, 24_000)).decode())
        connection.input_audio_buffer.commit()
        kinds = []
        for event in connection:
            kinds.append(event.type.rpartition(".")[2])
            if event.type == "conversation.item.input_audio_transcription.completed":
                assert event.transcript.startswith("Blocks are pages")
                break
    assert kinds == ["created", "updated", "committed", "delta", "completed"]


def test_utterances_are_answered_in_their_order(hearing: Served) -> None:
    hearing.llm.token_interval_s = 0.001
    with opened(hearing, OPENAI) as client:
        for seconds in (1.9, 0.1, 0.2):
            client.append(pcm(seconds, 24_000))
            client.commit()
        kind = "conversation.item.input_audio_transcription.completed"
        items = [next(each for each in client.until(kind) if each["type"] == kind)["item_id"] for _ in range(3)]
    assert items == ["item-1", "item-2", "item-3"]


def test_only_so_many_utterances_wait(hearing: Served) -> None:
    hearing.llm.hold_after = 1
    with opened(hearing) as client:
        for _ in range(4):
            client.append(pcm(0.1))
            client.commit()
        client.append(pcm(0.1))
        error = client.next() or {}
        assert (error["type"], error["code"]) == ("error", "too_many_utterances")
    eventually(lambda: not hearing.http._state.tasks)


APPEND = "input_audio_buffer.append"
WRONG: dict[str, tuple[Any, str | None, str]] = {
    "no JSON": (b"hello", None, "invalid_json"),
    "no object": ([], None, "invalid_type"),
    "no UTF-8": (b'{"type": "\xff"}', None, "invalid_json"),
    "no type": ({}, "type", "missing_required_parameter"),
    "unknown": ({"type": "response.create"}, "type", "unknown_event"),
    "field": ({"type": APPEND, "audio": "", "sound": ""}, "sound", "unknown_parameter"),
    "no audio": ({"type": APPEND}, "audio", "missing_required_parameter"),
    "number": ({"type": APPEND, "audio": 1}, "audio", "invalid_type"),
    "no base64": ({"type": APPEND, "audio": "%"}, "audio", "invalid_value"),
    "odd": ({"type": APPEND, "audio": "AAAA"}, "audio", "invalid_audio"),
    "model": ({"type": "session.update", "model": "other"}, "model", "model_not_found"),
    "transcriber": (
        {"type": "session.update", "session": {"audio": {"input": {"transcription": {"model": "other"}}}}},
        "session.audio.input.transcription.model",
        "model_not_found",
    ),
    "final": ({"type": "input_audio_buffer.commit", "final": "yes"}, "final", "invalid_type"),
    "conversation": (
        {"type": "session.update", "session": {"type": "realtime"}}, "session.type", "invalid_value",
    ),
    "turns": (
        {"type": "session.update", "session": {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}},
        "session.audio.input.turn_detection",
        "unsupported_parameter",
    ),
    "delay": (
        {"type": "session.update", "session": {"audio": {"input": {"transcription": {"delay": "low"}}}}},
        "session.audio.input.transcription.delay",
        "unsupported_parameter",
    ),
    "rate": (
        {"type": "session.update", "session": {"audio": {"input": {"format": {"rate": 1}}}}},
        "session.audio.input.format.rate",
        "invalid_value",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("sent", "param", "code"), WRONG.values(), ids=WRONG.keys())
def test_wrong_events_are_named_and_the_session_goes_on(
    sent: Any, param: str | None, code: str, hearing: Served
) -> None:
    with opened(hearing) as client:
        client.append(pcm(0.1))
        client.send(sent)
        error = client.next() or {}
        is_openai = (param or "").startswith("session.")
        told = error["error"] if is_openai else {**error, "message": error["error"]}
        assert (error["type"], told["param"], told["code"]) == ("error", param, code)
        assert isinstance(told["message"], str)
        client.commit(final=True)
        assert client.until("transcription.done")[-1]["text"].startswith("Blocks are pages")


def test_what_the_model_refuses_is_the_answer_to_its_utterance(hearing: Served) -> None:
    with opened(hearing) as client:
        client.send({"type": "session.update", "language": "xx"})
        client.append(pcm(0.1))
        client.commit()
        assert "expected one of en, fr" in (client.next() or {})["error"]
        client.send({"type": "session.update"})
        client.append(pcm(0.1))
        client.commit()
        assert client.until("transcription.done")[-1]["text"]


def test_a_model_of_text_hears_nothing(server: Served) -> None:
    with opened(server) as client:
        for _ in range(3):
            client.append(pcm(0.1))
        assert (client.next() or {})["code"] == "unsupported_task"
        client.commit(final=True)
        client.commit(final=True)
        assert client.next() == {
            "type": "transcription.done", "text": "", "usage": dict.fromkeys(
                ("prompt_tokens", "completion_tokens", "total_tokens"), 0
            ),
        }  # fmt: skip


def test_what_was_cleared_is_not_written_down(hearing: Served) -> None:
    with opened(hearing) as client:
        client.append(pcm(0.9))
        client.send({"type": "input_audio_buffer.clear"})
        client.commit()
        client.append(pcm(0.1))
        client.commit(final=True)
        assert len(client.until("transcription.done")) == 1
    assert {prompt.media[0].digest for _, prompt, _, _ in hearing.llm.requests} == {
        hearing.llm.requests[0][1].media[0].digest
    }


def test_a_sound_has_the_limit_of_a_body(start_server: Start, hearing: Served) -> None:
    server = hears(start_server(max_body_size=20_000), hearing)
    with opened(server) as client:
        client.append(pcm(0.5))
        client.append(pcm(0.5))
        error = client.next() or {}
        assert (error["code"], "--max-body-size" in error["error"]) == ("audio_buffer_full", True)
        client.commit()
        assert client.until("transcription.done")[-1]["text"]


def test_an_utterance_without_a_commit_is_transcribed_and_the_turn_continues(
    start_server: Start, hearing: Served
) -> None:
    server = hears(start_server(body_timeout_s=0.5), hearing)
    server.llm.token_interval_s = 0.005
    with opened(server) as client:
        client.send({"type": "session.update", "temperature": 0.5})
        client.append(pcm(0.1))
        said = (client.next() or {})["delta"]
        eventually(lambda: len(server.http._state.tasks) == 1)  # its memory is free
        client.append(pcm(0.2))
        client.commit()
        (done,) = client.until("transcription.done")
        assert done["text"] == f"{said.strip()} {said.strip()}"
        begin = time.monotonic()
        client.append(pcm(0.1))
        client.commit()
        assert client.until("transcription.done")[-1]["text"]
        assert time.monotonic() - begin > 0.5  # of the model there is more time


def test_sounds_of_all_sessions_share_the_memory_of_bodies(start_server: Start, hearing: Served) -> None:
    server = hears(start_server(max_body_size=170_000, max_bodies_size=170_000), hearing)
    with opened(server) as first, opened(server) as second:
        first.append(pcm(5.0))  # 160 kB
        eventually(lambda: server.http._app._bodies._shared._num_held > 90_000)
        second.append(pcm(5.0))
        assert (second.next() or {})["code"] == "too_many_bodies"
        first.commit()
        assert first.until("transcription.done")[-1]["text"]
        second.commit()
        second.append(pcm(5.0))
        second.commit()
        assert second.until("transcription.done")[-1]["text"]


def test_requests_end_with_the_connection(hearing: Served) -> None:
    hearing.llm.hold_after = 1
    with opened(hearing) as client:
        client.append(pcm(0.1))
        client.commit()
        eventually(lambda: len(hearing.llm.requests) == 3)  # is anything said, in which language, what
        client.append(pcm(0.1))
    eventually(lambda: hearing.llm.aborted)
    eventually(lambda: not hearing.http._state.tasks and not hearing.http._connections._open)


KEYS = """
- {name: one, key: one-secret, requests_per_minute: 2}
- {name: two, key: two-secret, max_parallel_requests: 1}
"""


def test_keys_are_needed_and_their_limits_count(start_server: Start, hearing: Served, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(KEYS)
    server = hears(start_server(api_key_file=str(tmp_path / "keys.yaml")), hearing)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Sec_WebSocket_Protocol": "openai-insecure-api-key.wrong"}):
        with WebSocketClient(server.url, **headers) as client:
            assert client.status == 401
            assert json.loads(client.file.read1())["error"]["code"] == "invalid_api_key"
    with opened(server, Authorization="Bearer one-secret") as client:
        for _ in range(2):
            client.append(pcm(0.1))
            client.commit()
            assert client.until("transcription.done")[-1]["text"]
        client.append(pcm(0.1))
        error = client.next() or {}
        assert (error["code"], "requests_per_minute" in error["error"]) == ("rate_limit_exceeded", True)
    page = opened(server, Sec_WebSocket_Protocol="realtime, openai-insecure-api-key.two-secret")
    with page, opened(server, x_api_key="two-secret") as other:
        assert "sec-websocket-protocol: realtime\r\n" in page.head.lower()
        page.append(pcm(0.1))
        eventually(lambda: server.http._app.keys._meters["two"]._num_open)
        other.append(pcm(0.1))
        assert (other.next() or {})["code"] == "rate_limit_exceeded"


def test_pages_of_other_origins_and_hosts_do_not_connect(start_server: Start, server: Served) -> None:
    with WebSocketClient(server.url, Origin="https://evil.example") as client:
        assert client.status == 403
    with WebSocketClient(server.url, Host="evil.example") as client:
        assert client.status == 403
    allowing = start_server(allowed_origins=("https://good.example",))
    for served, origin in ((server, server.url), (allowing, "https://good.example")):
        with WebSocketClient(served.url, Origin=origin) as client:
            assert client.status == 101


def test_a_stopping_server_answers_what_was_committed(start_server: Start, hearing: Served) -> None:
    server = hears(start_server(), hearing)
    server.llm.token_interval_s = 0.002
    with opened(server) as idle, opened(server) as collecting, opened(server) as committed:
        collecting.append(pcm(0.1))
        committed.append(pcm(0.1))
        committed.commit()
        eventually(lambda: server.llm.requests)
        server.on_loop(server.signals.stop)
        assert idle.next() is None
        assert idle.closed_with == 1001
        assert (collecting.next() or {})["code"] == "server_shutting_down"
        assert collecting.next() is None
        assert committed.until("transcription.done")[-1]["text"].startswith("Blocks")
        assert committed.next() is None
    assert server.join() == 0


def test_a_stopping_server_waits_no_longer_than_it_should(start_server: Start, hearing: Served) -> None:
    server = hears(start_server(shutdown_timeout_s=0.2), hearing)
    server.llm.hold_after = 1
    with opened(server) as client:
        client.append(pcm(0.1))
        client.commit()
        eventually(lambda: server.llm.requests)
        server.on_loop(server.signals.stop)
        assert client.until("error")[-1]["code"] == "server_shutting_down"
        assert client.next() is None
    assert server.join() == 0
    assert server.llm.aborted


def test_a_stopping_server_opens_no_session(start_server: Start) -> None:
    server = start_server()
    server.http.context.open_requests.is_closing = True
    with WebSocketClient(server.url) as client:
        assert client.status == 503


def test_the_log_has_the_session_and_its_utterances(
    caplog: pytest.LogCaptureFixture, start_server: Start, hearing: Served
) -> None:
    server = hears(start_server(log_requests=True), hearing)
    caplog.set_level("INFO")
    with opened(server, X_Request_Id="r-7") as client:
        client.append(pcm(0.1))
        client.commit()
        client.until("transcription.done")
    server.stop()
    assert "POST /v1/audio/transcriptions 200" in caplog.text
    assert "sess-r-7-item-1" in caplog.text
    assert "GET /v1/realtime 101" in caplog.text


def test_a_silent_session_is_pinged(start_server: Start) -> None:
    with opened(start_server(sse_keep_alive_interval=0.05)) as client:
        assert [client.frame()[0] for _ in range(2)] == [9, 9]


def test_a_path_of_a_proxy_stands_before_it(start_server: Start, hearing: Served) -> None:
    server = hears(start_server(root_path="/llm"), hearing)
    for path in ("/v1/realtime", "/llm/v1/realtime"):
        with opened(server, path) as client:
            client.append(pcm(0.1))
            client.commit()
            assert client.until("transcription.done")[-1]["text"]


def test_an_encrypted_session_does_the_same(start_server: Start, hearing: Served, tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    server = hears(start_server(**pair), hearing)
    trusting = ssl.create_default_context(cafile=pair["ssl_certfile"])
    with opened(server, tls=trusting) as client:
        client.append(pcm(0.9))
        client.commit()
        assert client.until("transcription.done")[-1]["text"]
        client.send(b" " * (2 << 20))
        assert (client.next() or {})["code"] == "message_too_large"
        assert client.next() is None
        assert client.file.read() == b""
    with opened(server, tls=trusting) as client:
        client.append(pcm(0.9))
        server.on_loop(server.signals.stop)
        assert (client.next() or {})["code"] == "server_shutting_down"
    assert server.join() == 0
    assert not server.http._connections._open


@pytest.mark.slow
def test_several_api_servers_write_down_what_one_does(tmp_path: Path, serve: Callable[..., WarmServer]) -> None:
    server = serve(make_whisper(tmp_path), "--dtype", "float32", "--api-server-count", "2", "--seed", "1")
    samples = (tone(1.9) * 32767).astype("<i2").tobytes()
    texts = set()
    for _ in range(4):
        with WebSocketClient(server.url) as client:
            client.next()
            client.send({"type": "session.update", "language": "en", "temperature": 0.01})
            client.append(samples)
            client.commit(final=True)
            texts.add(client.until("transcription.done")[-1]["text"])
    assert len(texts) == 1
    assert ask(server.url, "/metrics").status == 200
    assert server.stop() == 0
