"""Training on a minuscule network: it learns, exports what others can load, and goes on after an interruption."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from training.octavo_tiny.batches import RowShape
from training.octavo_tiny.checkpoint import Progress, load_checkpoint
from training.octavo_tiny.evaluate import continue_text, held_out_perplexity
from training.octavo_tiny.evaluate import main as evaluate
from training.octavo_tiny.network import Network, NetworkShape
from training.octavo_tiny.train import FIRST_NEW_DOCUMENT, TrainingPlan, learning_rate, main, make_optimizers, train

SHAPE = NetworkShape(
    vocab_size=384, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_size=16, intermediate_size=48,
    max_positions=256,
)  # fmt: skip
PLAN = TrainingPlan(
    shape=SHAPE,
    short_rows=RowShape(rows=2, length=128),
    long_rows=RowShape(rows=1, length=256),
    warmup_steps=2,
    tokenizer_documents=60,
    report_every_steps=4,
    max_steps=24,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Network, Tokenizer, list[float]]:
    output = tmp_path_factory.mktemp("model")
    network, tokenizer, losses = train(output, PLAN)
    return output, network, tokenizer, losses


def test_the_loss_falls(trained: tuple[Path, Network, Tokenizer, list[float]]) -> None:
    losses = trained[3]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.3


def test_the_exported_folder_agrees_with_the_network(trained: tuple[Path, Network, Tokenizer, list[float]]) -> None:
    output, network, tokenizer, _ = trained
    config = json.loads((output / "config.json").read_text())
    tensors = load_file(output / "model.safetensors")
    assert config["num_key_value_heads"] == 1
    assert set(tensors) == set(network.state_dict())
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert Tokenizer.from_file(str(output / "tokenizer.json")).get_vocab_size() == tokenizer.get_vocab_size() == 384


def test_a_resumed_run_continues_where_the_checkpoint_was(
    trained: tuple[Path, Network, Tokenizer, list[float]], tmp_path: Path
) -> None:
    halfway = replace(PLAN, max_steps=12)
    network, _, _ = train(tmp_path, halfway)
    restored = Network(SHAPE)
    optimizers = make_optimizers(restored, PLAN)
    progress = load_checkpoint(tmp_path / "checkpoint", restored, optimizers)
    assert progress.steps == 12
    assert progress.next_document > 0
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, dict(restored.named_parameters())[name])
    assert sum(len(optimizer.state) for optimizer in optimizers) == len(list(restored.parameters()))

    train(tmp_path, PLAN, resume=True)
    assert load_checkpoint(tmp_path / "checkpoint", restored, optimizers).steps == 24


def test_a_run_may_begin_with_exported_weights_and_reads_documents_that_the_first_did_not(
    trained: tuple[Path, Network, Tokenizer, list[float]], tmp_path: Path
) -> None:
    exported = trained[0]
    network, tokenizer, _ = train(tmp_path, replace(PLAN, start_from=exported, max_steps=1, peak_learning_rate=1e-9))
    before = load_file(exported / "model.safetensors")
    assert all(torch.equal(tensor.bfloat16(), before[name]) for name, tensor in network.state_dict().items())
    assert tokenizer.to_str() == trained[2].to_str()
    restored = Network(SHAPE)
    progress = load_checkpoint(tmp_path / "checkpoint", restored, make_optimizers(restored, PLAN))
    assert progress.next_document > FIRST_NEW_DOCUMENT


def test_the_learning_rate_warms_up_and_ends_at_zero() -> None:
    plan = TrainingPlan(minutes=10, warmup_steps=10, peak_learning_rate=1.0)
    assert learning_rate(plan, Progress()) == pytest.approx(0.1)
    assert learning_rate(plan, Progress(steps=50, elapsed_s=300)) == pytest.approx(0.5)
    assert learning_rate(plan, Progress(steps=99, elapsed_s=700)) == 0.0


def test_training_lowers_the_held_out_perplexity(trained: tuple[Path, Network, Tokenizer, list[float]]) -> None:
    _, network, tokenizer, _ = trained
    before = held_out_perplexity(Network(SHAPE), tokenizer, "chat", 5)
    assert held_out_perplexity(network, tokenizer, "chat", 5) < 0.8 * before


def test_the_exported_folder_is_evaluated_by_the_command(
    trained: tuple[Path, Network, Tokenizer, list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    output, network, tokenizer, _ = trained
    evaluate([str(output), "--documents", "3"])
    printed = dict(re.findall(r"perplexity, (\w+): ([0-9.]+)", capsys.readouterr().out))
    assert set(printed) == {"story", "prose", "chat"}
    # the export rounds to bfloat16, which moves the perplexity by little
    assert float(printed["story"]) == pytest.approx(held_out_perplexity(network, tokenizer, "story", 3), rel=0.05)


def test_continuing_a_text_greedily_is_deterministic(trained: tuple[Path, Network, Tokenizer, list[float]]) -> None:
    _, network, tokenizer, _ = trained
    assert continue_text(network, tokenizer, "Once", 8) == continue_text(network, tokenizer, "Once", 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], "there is no"),
        (["--minutes", "0"], "--minutes is 0"),
        (["--minutes", "nan"], "--minutes is nan"),
        (["--threads", "0"], "--threads is 0"),
        (["--max-steps", "0"], "--max-steps is 0"),
        (["--learning-rate", "0"], "--learning-rate is 0"),
        (["--start-from", "/nowhere"], "--start-from is /nowhere, which holds no exported model"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path), *options])
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_exported_weights_can_be_read_by_everybody(trained: tuple[Path, Network, Tokenizer, list[float]]) -> None:
    assert (trained[0] / "model.safetensors").stat().st_mode & 0o444 == 0o444
