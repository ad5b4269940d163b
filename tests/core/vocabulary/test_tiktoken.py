"""Files of tokens with ranks cut texts as the code beside them does, and serve grammars."""

from __future__ import annotations

import base64
import json
import random
import unicodedata
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex

from octavo.config.draft_config import _tokens
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.core.vocabulary.tiktoken import GPT4, PATTERN, QWEN
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.structured_output.matchers import Matchers
from tests.fakes.pair_merges import merged_pairs

TEXT = """The cat's hats aren't HERE, they're THERE: don't you'll I'VE camelCase HTTPServer naïve Ünïcode.
12345 678 9 x=[1,2,3];  if (a  ==  b) {\n\treturn  "c";\r\n}\n\n\n   end   \n 月の光は東京の空に。中文字符和English混合
한국어 텍스트 ½ ² ٣ ﷽ 😀👍🏽 e\u0301
"""
LISTED = {"[BOS]": True, "[EOS]": True, "<|im_end|>": True, "<|tool_call_begin|>": False}
"""Tokens, and whether they are special."""
CONFIG = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]"}


def pieces(text: str, pattern: str = PATTERN) -> list[bytes]:
    return [found.group().encode() for found in regex.finditer(f"(?V1){pattern}", text)]


@cache
def ranks() -> dict[bytes, int]:
    """Bytes, and the pairs that are most frequent in the text, one after the other."""
    words = [[bytes([byte]) for byte in piece] for piece in pieces(TEXT)]
    tokens = [*(bytes([byte]) for byte in range(256)), *merged_pairs(words, 120)]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def cut(text: str, pattern: str = PATTERN) -> list[int]:
    """What tiktoken computes: of all pairs in a piece the one whose token has the lowest rank is joined first."""
    made = []
    for piece in pieces(text, pattern):
        parts = [bytes([byte]) for byte in piece] if piece not in ranks() else [piece]
        while True:
            joined = [(ranks().get(a + b, 1 << 30), at) for at, (a, b) in enumerate(pairwise(parts))]
            best, at = min(joined, default=(1 << 30, 0))
            if best == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        made += [ranks()[part] for part in parts]
    return made


def write(path: Path, **config: Any) -> Path:
    first = len(ranks())
    listed = {
        str(first + place): {"content": text, "special": is_special, "lstrip": False}
        for place, (text, is_special) in enumerate(LISTED.items())
    }
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks().items()]
    (path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    values = {**CONFIG, "added_tokens_decoder": listed, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(values))
    return path


def test_texts_are_cut_as_tiktoken_cuts_them(tmp_path: Path) -> None:
    tokenizer, choose = Tokenizer.open(write(tmp_path)), random.Random(0)
    texts = [TEXT, *("".join(choose.choices(TEXT, k=60)) for _ in range(200))]
    for text in texts:
        assert tokenizer.encode(text) == cut(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert Tokenizer.open(tmp_path / "tiktoken.model").encode(TEXT) == cut(TEXT)


def test_special_tokens_stand_behind_those_with_ranks(tmp_path: Path) -> None:
    tokenizer, first = Tokenizer.open(write(tmp_path)), len(ranks())
    assert len(tokenizer) == first + 256
    assert tokenizer.encode("a<|im_end|>[BOS]") == [*cut("a"), first + 2, first]
    assert tokenizer.token_id("<|reserved_token_400|>") == 400
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (first, first + 1)
    called = [first + 3, first + 2]
    assert (tokenizer.decode(called), tokenizer.decode(called, False)) == (
        "<|tool_call_begin|>",
        "<|tool_call_begin|><|im_end|>",
    )
    found = _tokens(tmp_path)
    assert found is not None
    assert (len(found), found[first]) == (first + 256, "[BOS]")


def test_grammars_know_its_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write(tmp_path))
    matchers = Matchers(tmp_path, len(tokenizer), [len(ranks()) + 1])
    try:
        assert matchers.compile(StructuredOutputsParams(choice=("hats", "月"))).result()
    finally:
        matchers.close()


@pytest.mark.parametrize("line", ["!!! 7", "YQ== 7 8", "YQ==", "YQ== seven", "YQ== 1000", "YQ== 376"])
def test_a_damaged_file_is_refused(line: str, tmp_path: Path) -> None:
    file = write(tmp_path) / "tiktoken.model"
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model: is not a usable tokenizer .*; download it again"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([bytes([byte]) for byte in range(256) if byte != 104], "1 of 256 bytes have no token, the first is 0x68"),
        ([bytes([byte]) for byte in range(256)] + [b"a" * 200_000], "1 to 512 bytes, but one has 200,000"),
    ],
)
def test_vocabularies_that_lose_bytes_or_take_hours_are_refused(tokens: list[bytes], said: str, tmp_path: Path) -> None:
    write(tmp_path, added_tokens_decoder={})
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    with pytest.raises(CheckpointError, match=rf"tiktoken\.model: is not a usable tokenizer .*{said}"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    ("place", "content", "said"),
    [
        (0, "", "token 376 is '', which is no text"),
        (0, 5, "token 376 is 5, which is no text"),
        (0, "a", "token 376 is 'a', which is .* another token's"),
        (0, "<|reserved_token_400|>", "token 400 is .* another token's"),
        (256, "[X]", r"tokenizer_config\.json: added_tokens_decoder has the id 632, expected 376 to 631"),
        (-1, "[X]", r"tokenizer_config\.json: added_tokens_decoder has the id 375, expected 376 to 631"),
    ],
)
def test_added_tokens_that_shadow_others_are_refused(place: int, content: Any, said: str, tmp_path: Path) -> None:
    write(tmp_path, added_tokens_decoder={str(len(ranks()) + place): {"content": content}})
    with pytest.raises(CheckpointError, match=said):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("config", ["[" * 100_000, "[]", '{"added_tokens_decoder": ["x"]}'], ids=len)
def test_a_damaged_config_is_refused(config: str, tmp_path: Path) -> None:
    (write(tmp_path) / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: is not a tokenizer's config .*download it"):
        Tokenizer.open(tmp_path)


def test_files_of_other_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_class="HYTokenizer")
    with pytest.raises(UnsupportedModel, match="tokenizer_class is 'HYTokenizer', expected 'TikTokenTokenizer'"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="download it again"):
        Tokenizer.open(tmp_path)


def test_qwen_1_writes_characters_in_one_way_and_has_tokens_of_its_own(tmp_path: Path) -> None:
    (write(tmp_path, tokenizer_class="QWenTokenizer", added_tokens_decoder={}) / "tiktoken.model").rename(
        tmp_path / "qwen.tiktoken"
    )
    tokenizer, first = Tokenizer.open(tmp_path), len(ranks())
    assert tokenizer.encode(TEXT) == cut(unicodedata.normalize("NFC", TEXT), QWEN)
    chat = "<|im_start|>user\nhats<|im_end|>\n"
    assert tokenizer.encode(chat) == [first + 1, *cut("user\nhats", QWEN), first + 2, *cut("\n", QWEN)]
    assert tokenizer.encode("<|endoftext|><|extra_204|>") == [first, first + 207]
    assert Tokenizer.open(tmp_path / "qwen.tiktoken").encode(chat) == tokenizer.encode(chat)


def test_glm_4_begins_each_text_with_two_tokens(tmp_path: Path) -> None:
    names = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|user|>"]
    first = len(ranks())
    listed = {str(first + place): {"content": name, "special": True} for place, name in enumerate(names)}
    write(tmp_path, tokenizer_class="ChatGLM4Tokenizer", added_tokens_decoder=listed)
    (tmp_path / "tiktoken.model").rename(tmp_path / "tokenizer.model")
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.encode(TEXT) == [first + 2, first + 4, *cut(TEXT, GPT4)]
    chat = "[gMASK]<sop><|user|>\nhats"
    assert tokenizer.encode(chat, add_special_tokens=False) == [first + 2, first + 4, first + 6, *cut("\nhats", GPT4)]
    without = {key: entry for key, entry in listed.items() if key != str(first + 4)}
    for wrong, reason in ((without, "lack <sop>"), ({**listed, str(first + 4): {}}, "is None, which is no text")):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": wrong})
        )
        with pytest.raises(CheckpointError, match=rf"tokenizer\.model: is not a usable tokenizer .* {reason}"):
            Tokenizer.open(tmp_path)
