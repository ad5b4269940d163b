"""Trains octavo-tiny from nothing: `python -m training.octavo_tiny.train --output DIR`.

The budget is wall time, or with `--max-steps` a number of steps. The learning rate falls linearly to zero over it, so
a run of any length ends well; a run that was interrupted goes on with `--resume` and keeps its schedule.
`--start-from DIR` begins with the weights and the tokenizer of an exported model, to teach it what the generator says
differently by now.
"""

import argparse
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.octavo_tiny.batches import IGNORED, PackedStream, RowShape
from training.octavo_tiny.checkpoint import Progress, load_checkpoint, save_checkpoint
from training.octavo_tiny.corpus import EARLY_WEIGHTS, LATE_WEIGHTS, make_documents
from training.octavo_tiny.evaluate import continue_text, print_perplexities
from training.octavo_tiny.export import export_model, load_exported
from training.octavo_tiny.network import Network, NetworkShape
from training.octavo_tiny.tokenizer import train_tokenizer

SAMPLE_PROMPTS = (
    "Once upon a time",
    "The paged attention algorithm",
    "<|im_start|>user\nHi, what is a KV cache?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\n",
)

FIRST_NEW_DOCUMENT = 500_000_000
"""Number of the first document of a run with `start_from`: the run that made those weights did not reach it."""


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that a run depends on besides the machine."""

    minutes: float = 90.0
    seed: int = 0
    shape: NetworkShape = field(default_factory=NetworkShape)
    short_rows: RowShape = field(default_factory=lambda: RowShape(rows=16, length=256))
    long_rows: RowShape = field(default_factory=lambda: RowShape(rows=4, length=1024))
    long_share: float = 0.15
    late_from: float = 0.4
    peak_learning_rate: float = 8e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    tokenizer_documents: int = 20_000
    checkpoint_every_s: float = 300.0
    report_every_steps: int = 20
    max_steps: int | None = None
    use_bfloat16: bool = True
    start_from: Path | None = None


def make_optimizers(network: Network, plan: TrainingPlan) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for embedding and norms."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        (matrices if parameter.dim() == 2 and "embed_tokens" not in name else others).append(parameter)
    rate = plan.peak_learning_rate
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def used_share(plan: TrainingPlan, progress: Progress) -> float:
    """Return how much of the budget is used, between 0 and 1."""
    used = progress.elapsed_s / (60 * plan.minutes)
    if plan.max_steps is not None:
        used = max(used, progress.steps / plan.max_steps)
    return min(1.0, used)


def learning_rate(plan: TrainingPlan, progress: Progress) -> float:
    """Return the learning rate: a short warm-up, then a straight line to zero over the budget."""
    warmup = min(1.0, (progress.steps + 1) / plan.warmup_steps)
    return plan.peak_learning_rate * warmup * (1.0 - used_share(plan, progress))


def loss_of(network: Network, inputs: Tensor, targets: Tensor, use_bfloat16: bool) -> Tensor:
    """Return the mean cross entropy of the targets, with matrix products in bfloat16 or float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=use_bfloat16):
        logits = network(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def take_step(
    network: Network,
    optimizers: list[torch.optim.Optimizer],
    inputs: Tensor,
    targets: Tensor,
    rate: float,
    use_bfloat16: bool,
) -> float:
    """Update the network once at learning rate `rate`; return the loss before the update."""
    loss = loss_of(network, inputs, targets, use_bfloat16)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def make_tokenizer(plan: TrainingPlan) -> Tokenizer:
    """Learn the tokenizer from the first documents of the corpus."""
    documents = make_documents(plan.seed, 0, plan.tokenizer_documents)
    return train_tokenizer((document.text for document in documents), plan.shape.vocab_size)


def make_network(output: Path, plan: TrainingPlan, resume: bool) -> tuple[Network, Tokenizer]:
    """Return the network and its tokenizer: new ones, those of `plan.start_from`, or those of a resumed run."""
    if plan.start_from is not None:
        return load_exported(plan.start_from)
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json")) if resume else make_tokenizer(plan)
    return Network(plan.shape), tokenizer


def is_finished(plan: TrainingPlan, progress: Progress) -> bool:
    """Tell whether the budget of time or steps is used up."""
    return used_share(plan, progress) >= 1.0


def report(plan: TrainingPlan, progress: Progress, loss: float, tokens_per_s: float) -> None:
    """Print one line of progress."""
    left_min = max(0.0, plan.minutes - progress.elapsed_s / 60)
    print(
        f"step {progress.steps:6d}  {progress.tokens / 1e6:7.2f} M tokens  loss {loss:.4f}  "
        f"lr {learning_rate(plan, progress):.2e}  {tokens_per_s:6.0f} tokens/s  {left_min:5.1f} min left",
        flush=True,
    )


def print_samples(network: Network, tokenizer: Tokenizer) -> None:
    """Print what the network makes of a few prompts."""
    for prompt in SAMPLE_PROMPTS:
        text = continue_text(network, tokenizer, prompt, max_tokens=60, temperature=0.5)
        print(f"  > {prompt!r}\n    {text!r}", flush=True)


def train(output: Path, plan: TrainingPlan, resume: bool = False) -> tuple[Network, Tokenizer, list[float]]:
    """Train, exporting to `output` at every checkpoint; return the network, its tokenizer and the reported losses."""
    torch.manual_seed(plan.seed)
    checkpoints = output / "checkpoint"
    network, tokenizer = make_network(output, plan, resume)
    optimizers = make_optimizers(network, plan)
    first = Progress(next_document=FIRST_NEW_DOCUMENT if plan.start_from else 0)
    progress = load_checkpoint(checkpoints, network, optimizers) if resume else first
    stream = PackedStream(tokenizer, plan.seed, plan.short_rows, plan.long_rows, progress.next_document)

    losses: list[float] = []
    recent_losses: list[float] = []
    recent_tokens = 0
    last = mark = time.monotonic()
    saved_at_s = progress.elapsed_s
    while not is_finished(plan, progress):
        is_late = plan.start_from is not None or used_share(plan, progress) >= plan.late_from
        rows, target_rows = stream.next_batch(plan.long_share, LATE_WEIGHTS if is_late else EARLY_WEIGHTS)
        inputs, targets = torch.tensor(rows), torch.tensor(target_rows)
        loss = take_step(network, optimizers, inputs, targets, learning_rate(plan, progress), plan.use_bfloat16)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss became {loss} at step {progress.steps}; try a lower learning rate")
        now = time.monotonic()
        progress.steps += 1
        progress.tokens += inputs.numel()
        progress.elapsed_s += now - last
        progress.next_document = stream.next_document
        last = now
        recent_losses.append(loss)
        recent_tokens += inputs.numel()
        if progress.steps % plan.report_every_steps == 0:
            losses.append(sum(recent_losses) / len(recent_losses))
            report(plan, progress, losses[-1], recent_tokens / (now - mark))
            recent_losses, recent_tokens, mark = [], 0, now
        if progress.elapsed_s - saved_at_s >= plan.checkpoint_every_s:
            saved_at_s = progress.elapsed_s
            save_checkpoint(checkpoints, network, optimizers, progress)
            export_model(network, tokenizer, output)
            print_samples(network, tokenizer)
    save_checkpoint(checkpoints, network, optimizers, progress)
    export_model(network, tokenizer, output)
    return network, tokenizer, losses


def main(command_line: list[str] | None = None) -> None:
    """Parse the command line, train, and print the held-out perplexity."""
    parser = argparse.ArgumentParser(
        prog="python -m training.octavo_tiny.train", description="Train the demonstration model octavo-tiny."
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the model; checkpoints go into its subfolder"
    )
    parser.add_argument("--minutes", type=float, default=90.0, help="wall time of the training (default: 90)")
    parser.add_argument("--max-steps", type=int, help="end after this many steps, if --minutes does not end the run")
    parser.add_argument(
        "--learning-rate", type=float, default=8e-3, help="peak learning rate (default: 0.008; less with --start-from)"
    )
    parser.add_argument("--start-from", type=Path, help="folder of an exported model whose weights the run begins with")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of text, weights and order (default: 0)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the output folder")
    parser.add_argument(
        "--float32", action="store_true", help="compute in float32: faster on processors without bfloat16 instructions"
    )
    arguments = parser.parse_args(command_line)
    if not 0 < arguments.minutes < float("inf"):
        parser.error(f"--minutes is {arguments.minutes}; it must be a positive number")
    if not 0 < arguments.learning_rate < float("inf"):
        parser.error(f"--learning-rate is {arguments.learning_rate}; it must be a positive number")
    if arguments.max_steps is not None and arguments.max_steps < 1:
        parser.error(f"--max-steps is {arguments.max_steps}; it must be at least 1")
    if arguments.start_from is not None and not (arguments.start_from / "model.safetensors").exists():
        parser.error(f"--start-from is {arguments.start_from}, which holds no exported model")
    if arguments.threads < 1:
        parser.error(f"--threads is {arguments.threads}; it must be at least 1")
    checkpoint = arguments.output / "checkpoint" / "checkpoint.safetensors"
    if arguments.resume and not checkpoint.exists():
        parser.error(f"--resume: there is no {checkpoint}; leave the option out to begin a new run")
    torch.set_num_threads(arguments.threads)
    plan = TrainingPlan(
        minutes=arguments.minutes,
        seed=arguments.seed,
        peak_learning_rate=arguments.learning_rate,
        max_steps=arguments.max_steps,
        use_bfloat16=not arguments.float32,
        start_from=arguments.start_from,
    )
    network, tokenizer, _ = train(arguments.output, plan, arguments.resume)
    print_samples(network, tokenizer)
    print_perplexities(network, tokenizer, num_documents=200)


if __name__ == "__main__":
    main()
