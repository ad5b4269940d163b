"""A batch has a result for each line, whatever is in it."""

from __future__ import annotations

import base64
import dataclasses
import json
import resource
from pathlib import Path
from typing import cast

import msgspec
import pytest

from octavo.async_llm import AsyncLLM
from octavo.cli.run_batch import count_results, write_results
from octavo.config.server_args import ServerArgs
from octavo.server.app import build_app
from tests.server.fake_llm import FakeAsyncLLM
from tests.server.fake_llm import fakes_read_texts_inline as fakes_read_texts_inline
from tests.server.routes.test_audio import LETTERS, wav


def line(custom_id: str, url: str = "/v1/completions", **body: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"max_tokens": 3, **body}})


@pytest.mark.anyio
async def test_each_line_has_its_result_and_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    source, target, partial = (tmp_path / name for name in ("in", "out", "out.partial"))
    chat = line("b", "/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    bad = ["no JSON", line("c", prompt=5), line("d", prompt="a", stream=True), line("e", "/metrics")]
    source.write_text("\n".join([line("done", prompt="a"), line("a", prompt="a"), "", chat, *bad]))
    partial.write_text('{"custom_id":"done"}\n{"cut')
    app = build_app(cast(AsyncLLM, FakeAsyncLLM()), ServerArgs())
    await write_results(app, source, target)
    results = [json.loads(each) for each in target.read_text().splitlines()]
    assert [each["custom_id"] for each in results] == ["done", "a", "b", None, "c", "d", "e"]
    assert results[1]["response"]["body"]["choices"][0]["text"] == "Blo"
    assert results[2]["response"]["body"]["choices"][0]["message"]["content"] == "Blo"
    assert results[4]["response"]["status_code"] == 400
    assert [bool(each["error"]) for each in results[3:]] == [True, False, True, True]
    assert count_results(target) == (7, 5)  # the first one was done before, with no response
    assert not partial.exists()


@pytest.mark.anyio
async def test_a_line_that_nests_deeply_has_an_error_and_the_others_their_results(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    deep = '{"custom_id": "deep", "url": "/v1/completions", "body": {"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}}"
    source.write_text("\n".join([deep, line("a", prompt="a")]))
    await write_results(build_app(cast(AsyncLLM, FakeAsyncLLM()), ServerArgs()), source, target)
    results = [json.loads(each) for each in target.read_text().splitlines()]
    assert "recursion" in results[0]["error"]["message"]
    assert results[1]["response"]["status_code"] == 200


@pytest.mark.anyio
async def test_a_number_that_is_out_of_range_is_named_by_its_field(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a", "temperature": 1e400}}')
    await write_results(build_app(cast(AsyncLLM, FakeAsyncLLM()), ServerArgs()), source, target)
    [result] = [json.loads(each) for each in target.read_text().splitlines()]
    assert result["response"]["status_code"] == 400
    assert result["response"]["body"]["error"]["message"] == "temperature: number out of range"


@pytest.mark.anyio
async def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(line("a", prompt="a"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        with pytest.raises(OSError, match=r"out\.partial"):
            await write_results(build_app(cast(AsyncLLM, FakeAsyncLLM()), ServerArgs()), source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.anyio
async def test_a_line_names_its_sound_by_a_url(tmp_path: Path) -> None:
    source, target, folder = (tmp_path / name for name in ("in", "out", "sounds"))
    folder.mkdir()
    (folder / "config.json").write_text('{"max_source_positions": 50, "num_mel_bins": 8}')
    (folder / "preprocessor_config.json").write_text('{"feature_size": 8}')
    (folder / "a.wav").write_bytes(wav(0.5))
    llm = FakeAsyncLLM()
    model = dataclasses.replace(
        llm.config.model, speech=LETTERS, path=str(folder), allowed_local_media_path=str(folder)
    )
    llm.config = msgspec.structs.replace(llm.config, model=model)
    data = "data:audio/wav;base64," + base64.b64encode(wav(0.5)).decode()
    granularities = {"response_format": "verbose_json", "timestamp_granularities": ["segment"]}
    url = "/v1/audio/transcriptions"
    lines = [
        spoken("a", url, file_url=f"file://{folder}/a.wav", temperature=0.5, language=None),
        spoken("b", "/v1/audio/translations", file_url=data, **granularities),
        spoken("c", url, file_url="file:///etc/passwd"),
        spoken("d", url, file_url="https://example.com/a.wav"),
        spoken("e", url, file=data),
        spoken("f", url, file_url=data, wrong=1),
    ]
    source.write_text("\n".join(lines))
    await write_results(build_app(cast(AsyncLLM, llm), ServerArgs()), source, target)
    found, timed, *errors = [json.loads(each) for each in target.read_text().splitlines()]
    assert found["response"]["body"]["text"].startswith("Blocks are pages")
    assert [each["end"] for each in timed["response"]["body"]["segments"]] == [0.5]
    messages = [
        each["error"]["message"] if each["error"] else each["response"]["body"]["error"]["message"] for each in errors
    ]
    expected = ("outside of the folder", "allow it with --allowed-media-domains", "needs the sound as file_url")
    assert all(
        part in message for part, message in zip((*expected, "wrong is not a known field"), messages, strict=True)
    )


def spoken(custom_id: str, url: str, **body: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})
