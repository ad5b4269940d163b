"""The pages for users of other engines have a true entry for every name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.cli.main import llama_cpp_flags
from octavo.config.sources import known_arguments
from octavo.core.absent import absent_options
from octavo.server.endpoints import ENDPOINTS
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.schema.completions import CompletionRequest
from tools import other_names
from tools.other_engines import main, pages

FOLDER = Path(__file__).parents[1] / "docs" / "recipes"
ARGUMENTS = [other_names.VLLM_ENGINE.split(), other_names.VLLM_SERVER.split(), other_names.VLLM_SAMPLING.split()]
FIELDS = other_names.VLLM_REQUEST.split()


@pytest.mark.parametrize("name", sorted(pages()))
def test_page_is_current(name: str) -> None:
    shown = (FOLDER / name).read_text(encoding="utf-8")
    assert shown == pages()[name], "run: python -m tools.other_engines docs/recipes"


def test_each_name_stands_once_in_its_list_and_each_note_belongs_to_one() -> None:
    assert [len(names) for names in (*ARGUMENTS, FIELDS)] == [len(set(names)) for names in (*ARGUMENTS, FIELDS)]
    assert set(other_names.VLLM_NOTES) <= {name for names in ARGUMENTS for name in names}
    assert set(other_names.VLLM_REQUEST_NOTES) <= set(FIELDS)


def test_a_name_is_the_same_or_has_another_name_or_one_value_or_a_reason() -> None:
    rows = [line.strip("|").split(" | ") for line in pages()["from-vllm.md"].splitlines() if line.startswith("| `")]
    fates = {name: (ours, note) for names, ours, note in rows for name in re.findall("`(.+?)`", names)}
    assert fates["max_num_seqs"] == fates["enable_lora"] == ("same", " ")
    assert fates["kv_cache_memory_bytes"] == ("`kv_cache_memory`", " ")
    assert fates["trust_remote_code"] == ("same", f"{other_names.VLLM_NOTES['trust_remote_code']} ")
    assert fates["fully_sharded_loras"] == ("not there yet", "this setting of LoRA adapters ")
    assert fates["enable_ssl_refresh"][0] == "refused"
    assert fates["enable_ssl_refresh"][1].startswith("SIGHUP reloads")
    assert fates["vllm_xargs"] == ("refused", "octavo has no such extensions ")


def test_what_servers_have_is_not_said_to_be_absent() -> None:
    notes = {spellings: (ours, note) for spellings, ours, note in llama_cpp_flags()}
    assert notes["--ssl-cert-file"][0] == "--ssl-certfile"
    assert notes["--reasoning-format"][0] == "--reasoning-parser"
    assert notes["--slot-save-path"][0] == "--kv-disk"
    assert not any("not there" in notes[name][1] for name in ("--grammar, --json-schema", "--webui"))
    assert "not there yet" not in absent_options()["thinking_token_budget"]
    assert "| `thinking_token_budget` | same |" in pages()["from-vllm.md"]  # chats have it, completions refuse it


def test_names_of_octavo_beside_those_of_llama_cpp_are_there() -> None:
    flags = {f"--{name.replace('_', '-')}" for name in known_arguments()}
    assert {ours for _, ours, _ in llama_cpp_flags()} - {""} <= flags
    assert {row.ours for row in other_names.LLAMA_CPP_FIELDS} - {""} <= set(CompletionRequest.__struct_fields__)
    endpoints = {f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS}
    assert {row.ours for row in other_names.LLAMA_CPP_ENDPOINTS} - {""} <= endpoints
    assert all(row.ours or row.note for row in other_names.LLAMA_CPP_FIELDS)
    assert all(ours or note for _, ours, note in llama_cpp_flags())


def test_fields_of_requests_are_those_of_the_schema() -> None:
    fields = {*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert set(FIELDS) <= fields


def test_pages_are_written_where_asked(tmp_path: Path) -> None:
    main(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == set(pages())


def test_what_reads_images_is_not_said_to_read_text_only() -> None:
    pages_said = "".join(pages().values())
    assert "text only" not in pages_said.replace("writes text only", "")
    notes = {spellings: ours for spellings, ours, _ in llama_cpp_flags()}
    assert notes["--embedding, --reranking"] == "--runner"
    assert "not there yet" not in absent_options()["gguf_file"]
