"""Finding a model by directory or by name, against a hub on a local port."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import huggingface_hub
import pytest

from octavo.config.args import EngineArgs
from octavo.config.hub import locate, locate_mmproj, locate_model, locate_tokenizer
from octavo.errors import CheckpointError, UnsupportedModel
from tests.fakes.hub import COMMIT, FakeHub, serve_hub

TEXT = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "chat_template.jinja": b"{{ messages }}"}
BOTH = {
    **TEXT,
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same weights",
    "consolidated.safetensors": b"once more",
    "onnx/model.json": b"{}",
    "README.md": b"read me",
}
NATIVE = {
    "params.json": b"{}",
    "tekken.json": b"{}",
    "consolidated-00001-of-00001.safetensors": b"weights",
    "consolidated.safetensors.index.json": b"{}",
}


ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    models = {
        "someone/both": BOTH,
        "someone/native": {**NATIVE, "README.md": b"read me", "onnx/consolidated.safetensors": b"no"},
        "someone/archive": {**TEXT, "pytorch_model.bin": b"weights", "training_args.bin": b"no"},
        "someone/gated": TEXT,
        "someone/embedder": {
            **BOTH,
            "modules.json": b'[{"type": "a.T", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}, '
            b'{"type": "a.Dense", "path": "2_Dense"}]',
            **dict.fromkeys(("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"), b"{}"),
        },
        "someone/adapted": {
            **BOTH,
            "config.json": b'{"architectures": ["Phi4MMForCausalLM"]}',
            **{
                f"{kind}-lora/{name}": b"{}"
                for kind in ("speech", "vision")
                for name in ("adapter_config.json", "adapter_model.safetensors", "README.md")
            },
        },
        "someone/tasks": {
            **BOTH,
            "config.json": b'{"architectures": ["JinaEmbeddingsV5Model"]}',
            **{f"adapters/{task}/{name}": b"{}" for task in ("retrieval", "clustering") for name in ADAPTER},
            "adapters/README.md": b"",
        },
        "someone/model-GGUF": {
            "model-q4_0.gguf": b"GGUF",
            "model-Q4_K_M.gguf": b"GGUF4",
            "model.Q8_0-00001-of-00002.gguf": b"GGUF8",
            "model.Q8_0-00002-of-00002.gguf": b"GGUF8",
            **{f"mmproj-model-{kind}.gguf": b"GGUF" for kind in ("Q8_0", "BF16", "F16", "f32")},
            "README.md": b"read me",
        },
    }
    with serve_hub(FakeHub(models, gated={"someone/gated"})) as served:
        yield served


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert locate(str(tmp_path)) == tmp_path


def test_a_name_becomes_a_directory_with_what_an_engine_reads(hub: FakeHub, tmp_path: Path) -> None:
    path = locate("someone/both", endpoint=hub.address, cache_dir=tmp_path)
    assert sorted(each.name for each in path.iterdir()) == sorted([*TEXT, "model.safetensors"])
    assert (path / "model.safetensors").read_bytes() == b"weights"


def test_mistrals_own_layout_is_fetched_where_there_is_no_other(hub: FakeHub, tmp_path: Path) -> None:
    path = locate("someone/native", endpoint=hub.address, cache_dir=tmp_path)
    assert sorted(each.name for each in path.iterdir()) == sorted(NATIVE)
    path = locate("someone/native", endpoint=hub.address, cache_dir=tmp_path / "text", with_weights=False)
    assert sorted(each.name for each in path.iterdir()) == ["params.json", "tekken.json"]


def test_folders_of_modules_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    path = locate("someone/embedder", endpoint=hub.address, cache_dir=tmp_path)
    assert {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()} == {
        *TEXT,
        *("modules.json", "model.safetensors", "1_Pooling/config.json"),
        *("2_Dense/config.json", "2_Dense/model.safetensors"),
    }


def test_adapters_for_images_and_sounds_are_fetched_with_the_weights(hub: FakeHub, tmp_path: Path) -> None:
    path = locate("someone/adapted", endpoint=hub.address, cache_dir=tmp_path, with_weights=False)
    assert not (path / "vision-lora").exists()
    path = locate("someone/adapted", endpoint=hub.address, cache_dir=tmp_path)
    found = {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()}
    adapters = {f"{kind}-lora/{each}" for kind in ("speech", "vision") for each in ADAPTER}
    assert found == {*TEXT, "model.safetensors", *adapters}


def test_adapters_of_all_tasks_are_fetched_with_the_weights(hub: FakeHub, tmp_path: Path) -> None:
    path = locate("someone/tasks", endpoint=hub.address, cache_dir=tmp_path)
    found = {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()}
    adapters = {f"adapters/{task}/{each}" for task in ("retrieval", "clustering") for each in ADAPTER}
    assert found == {*TEXT, "model.safetensors", *adapters}


def test_archives_are_fetched_only_where_there_is_nothing_better(hub: FakeHub, tmp_path: Path) -> None:
    path = locate("someone/archive", endpoint=hub.address, cache_dir=tmp_path)
    assert sorted(each.name for each in path.iterdir()) == sorted([*TEXT, "pytorch_model.bin"])


def test_without_weights_only_text_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    locate("someone/both", endpoint=hub.address, cache_dir=tmp_path, with_weights=False)
    assert sorted(hub.downloads) == sorted(TEXT)


def test_what_is_cached_is_not_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    first = locate("someone/both", endpoint=hub.address, cache_dir=tmp_path)
    count = len(hub.downloads)
    assert locate("someone/both", endpoint=hub.address, cache_dir=tmp_path) == first
    assert len(hub.downloads) == count


def test_a_commit_is_found_by_its_hash(hub: FakeHub, tmp_path: Path) -> None:
    assert locate("someone/both", COMMIT, endpoint=hub.address, cache_dir=tmp_path).name == COMMIT


def test_the_cache_is_enough_when_the_hub_is_gone(tmp_path: Path) -> None:
    with serve_hub(FakeHub({"someone/archive": {**TEXT, "pytorch_model.bin": b"weights"}})) as hub:
        path = locate("someone/archive", endpoint=hub.address, cache_dir=tmp_path)
        gone = hub.address
    assert locate("someone/archive", endpoint=gone, cache_dir=tmp_path) == path


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        (
            "someone/else",
            None,
            "^someone/else: .* has no such model, and there is no such file .*HF_TOKEN$",
        ),
        ("octavo_tiny", None, r"no such model.*; did you mean octavo-tiny\?$"),
        ("someone/both", "v2", "someone/both at revision v2: .* not this revision"),
        ("someone/gated", None, "accept them on its page"),
    ],
)
def test_what_the_hub_refuses_is_said_plainly(
    hub: FakeHub, tmp_path: Path, model: str, revision: str | None, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        locate(model, revision, endpoint=hub.address, cache_dir=tmp_path)


def test_an_unreachable_hub_is_said_plainly(tmp_path: Path) -> None:
    with serve_hub(FakeHub({})) as hub:
        gone = hub.address
    with pytest.raises(CheckpointError, match="^someone/both: .* cannot be reached, and there is no such file"):
        locate("someone/both", endpoint=gone, cache_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be reached, .*; did you mean octavo-tiny\?$"):
        locate("octavo-tinny", endpoint=gone, cache_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be reached, .*; did you mean llama3\.1:8b, llama3\.1:70b\?$"):
        locate("llama3.1", endpoint=gone, cache_dir=tmp_path)


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file.* cannot be written or read .*; name a directory .* download_dir"):
        locate("someone/both", endpoint=hub.address, cache_dir=tmp_path / "file" / "cache")


@pytest.mark.parametrize("model", [" a/b", "https://huggingface.co/a/b/", "a/b:"])
def test_a_name_with_something_around_it_is_suggested_alone(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"is no name on a hub .*; did you mean a/b\?$"):
        locate(model)


@pytest.mark.parametrize("model", ["/nowhere", "/models/nowhere/"])
def test_an_absolute_path_is_not_taken_for_a_name(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"is no name on a hub \(owner/model\); check the path or the name$"):
        locate(model)


def test_a_name_that_no_disk_takes_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"x{60}: cannot be looked for \(File name too long\); check the path"):
        locate("x" * 3000)


@pytest.mark.parametrize(
    "model", ["./missing", "/nowhere/at/all", "a/b/c", "~/missing", "~nobody-there/missing", "what is this?"]
)
def test_a_path_that_does_not_exist_is_no_reason_to_ask_a_hub(model: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        locate(model, endpoint="http://127.0.0.1:9")


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"is a file.*give the directory with config\.json"):
        locate(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["model.gguf", "sha256-0123"])
def test_a_gguf_file_is_a_model(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"GGUF\x03\x00\x00\x00")
    assert locate(str(tmp_path / name)) == tmp_path / name


def test_a_hub_name_with_gguf_files_alone_says_what_to_use_instead(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"has no config\.json, .*such as someone/model-GGUF:Q4_K_M, or use the model that they"
    ):
        locate("someone/model-GGUF", endpoint=hub.address, cache_dir=tmp_path)
    assert hub.downloads == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [("Q4_K_M", "model-Q4_K_M.gguf"), ("Q4_0", "model-q4_0.gguf"), ("q8_0", "model.Q8_0-00001-of-00002.gguf")],
)
def test_a_type_names_a_file_of_a_repository(kind: str, name: str, hub: FakeHub, tmp_path: Path) -> None:
    found = locate(f"someone/model-GGUF:{kind}", endpoint=hub.address, cache_dir=tmp_path)
    assert found.name == name
    assert found.read_bytes().startswith(b"GGUF")
    assert all(kind.lower() in each.lower() for each in hub.downloads)


def test_the_vision_encoder_in_one_of_its_types_comes_with_a_model(hub: FakeHub, tmp_path: Path) -> None:
    locate("someone/model-GGUF:Q4_K_M", endpoint=hub.address, cache_dir=tmp_path, with_encoder=True)
    assert sorted(hub.downloads) == ["mmproj-model-F16.gguf", "model-Q4_K_M.gguf"]


def test_a_file_of_a_vision_encoder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text("x")
    for name, said in (("m.txt", "is no GGUF file"), ("n.gguf", "does not exist")):
        with pytest.raises(CheckpointError, match=f"mmproj is .*{name}, which {said}; name the mmproj"):
            locate_mmproj(EngineArgs(mmproj=str(tmp_path / name)), tmp_path)
    assert locate_mmproj(EngineArgs(mmproj="n.gguf", limit_mm_per_prompt={"image": 0}), tmp_path) is None


def test_a_type_that_a_repository_lacks_is_said(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="someone/model-GGUF has no GGUF file of type Q6_K"):
        locate("someone/model-GGUF:Q6_K", endpoint=hub.address, cache_dir=tmp_path)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_an_offline_hub_names_the_variable_and_the_model(
    variable: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locate("someone/both", endpoint=hub.address, cache_dir=tmp_path, with_weights=False)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for model in ("someone/archive", "someone/both"):  # of one nothing is there, of the other all but the weights
        with pytest.raises(CheckpointError, match=rf"{model}: .*{variable} is set.*unset {variable} to download it"):
            locate(model, endpoint=hub.address, cache_dir=tmp_path)


def test_a_full_disk_of_downloads_is_said(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("the writer stopped") from error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"someone/both: .*the disk is full; free some space.*download_dir"):
        locate("someone/both", endpoint=hub.address, cache_dir=tmp_path)


def test_modelscope_is_asked_through_its_own_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str], **_: object) -> str:
        asked.append((name, revision, allow_patterns))
        if "*.safetensors" in allow_patterns:
            (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    library = ModuleType("modelscope.hub.snapshot_download")
    library.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    for name, module in (
        ("modelscope", ModuleType("modelscope")),
        ("modelscope.hub", ModuleType("modelscope.hub")),
        ("modelscope.hub.snapshot_download", library),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    assert locate("someone/both", "v1", source="modelscope") == tmp_path
    assert [(name, revision) for name, revision, _ in asked] == [("someone/both", "v1")] * 2
    assert "*.safetensors" in asked[1][2]


def test_modelscope_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(CheckpointError, match="pip install modelscope"):
        locate("someone/both", source="modelscope")


def test_arguments_lead_to_directories(tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").touch()
    args = EngineArgs(model=str(tmp_path))
    assert locate_model(args) == tmp_path
    assert locate_tokenizer(args, tmp_path) == tmp_path
    assert locate_tokenizer(EngineArgs(tokenizer=str(other)), tmp_path) == other
    assert locate_tokenizer(EngineArgs(tokenizer=str(other / "tokenizer.json")), tmp_path) == other / "tokenizer.json"
