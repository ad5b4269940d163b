"""Domyn Edge is Qwen3 with norms behind blocks too, and with windows, rotations and head sizes by layer."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from octavo.errors import OctavoError
from tests.fakes.checkpoints import edit_config, edit_tensors, load_oracle, make_checkpoint
from tests.models.loading import read_config
from tests.models.paged_run import load, logits_of

TOKENS = [3 + 7 * each % 120 for each in range(24)]
DIMS, TURNS, WINDOWS = (8, 12, 8), (True, True, False), (7, None, 7)
NAMES = {
    "input_layernorm": "pre_attention_norm",
    "post_attention_layernorm": "pre_feedforward_norm",
    "self_attn": "attention",
    "mlp": "feedforward",
}


def stored(name: str) -> str:
    return ".".join(NAMES.get(part, part) for part in name.split("."))


def domyn(folder: Path) -> tuple[Path, Tensor]:
    """Return a checkpoint, and the logits of TOKENS by transformers' Qwen3 with its blocks changed."""
    kinds = ["full_attention" if window is None else "sliding_attention" for window in WINDOWS]
    path = make_checkpoint(
        *("qwen3", folder),
        num_hidden_layers=3,
        layer_types=kinds,
        use_sliding_window=True,
        sliding_window=WINDOWS[0],
        head_dim=DIMS[0],
        tie_word_embeddings=False,
    )
    oracle, generator = load_oracle(path), torch.Generator().manual_seed(1)

    def behind(block: nn.Module, norm: nn.Module) -> None:
        norm.weight.data = 1 + 0.3 * torch.randn(32, generator=generator)
        block.register_forward_hook(
            lambda _, given, out: (norm(out[0]), *out[1:]) if isinstance(out, tuple) else norm(out)
        )

    def turned(layer: int, module: nn.Module, given: Any, named: Any) -> tuple[Any, Any]:
        angles = torch.arange(len(TOKENS))[:, None] / 10_000.0 ** (torch.arange(0, DIMS[layer], 2) / DIMS[layer])
        angles = torch.cat((angles, angles), 1)[None] * TURNS[layer]
        return given, named | {"position_embeddings": (angles.cos(), angles.sin())}

    own: dict[str, Tensor] = {}
    for index, layer in enumerate(oracle.model.layers):
        if DIMS[index] != DIMS[0]:
            config = deepcopy(oracle.config)
            config.head_dim = DIMS[index]
            layer.self_attn = type(layer.self_attn)(config, index)
            for weight in layer.self_attn.parameters():
                weight.data = torch.randn(weight.shape, generator=generator) * 0.3 + (weight.ndim == 1)
        layer.self_attn.q_norm.weight.data.fill_(1.0)
        layer.self_attn.register_forward_pre_hook(partial(turned, index), with_kwargs=True)
        for block, name in ((layer.self_attn, "attention"), (layer.mlp, "feedforward")):
            norm = type(layer.input_layernorm)(32, oracle.config.rms_norm_eps)
            behind(block, norm)
            own[f"model.layers.{index}.post_{name}_norm.weight"] = norm.weight.data
    with torch.inference_mode():
        expected: Tensor = oracle(torch.tensor([TOKENS])).logits[0]
    own |= {stored(name): each for name, each in oracle.state_dict().items() if not name.endswith("q_norm.weight")}
    edit_tensors(path, remove=tuple(load_file(path / "model.safetensors")), **own)
    edit_config(
        path,
        remove=("layer_types", "sliding_window", "use_sliding_window", "rope_parameters", "max_window_layers"),
        architectures=["DomynEdgeForCausalLM"],
        model_type="domyn_edge",
        rope_theta=10_000.0,
        window_sizes=[[-1, -1] if window is None else [window - 1, 0] for window in WINDOWS],
        position_layers=["rope" if each else "nope" for each in TURNS],
        per_layer_config={"1": {"head_dim": DIMS[1]}},
    )
    return path, expected


def test_layers_have_windows_rotations_and_head_sizes_of_their_own(tmp_path: Path) -> None:
    path, expected = domyn(tmp_path)
    torch.testing.assert_close(logits_of(load(path), TOKENS), expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"window_sizes": [[4, 0]]}, "window_sizes is .*, expected two numbers for each of 3 layers"),
        ({"window_sizes": [[4, 4]] * 3}, "window_sizes is .*, expected two numbers for each of 3 layers"),
        ({"position_layers": ["rope", "nope", "x"]}, 'position_layers is .*, expected "rope" or "nope"'),
        ({"per_layer_config": {"3": {"head_dim": 8}}}, "per_layer_config is .*, expected an object whose keys"),
        ({"per_layer_config": {"1": {"hidden_act": "x"}}}, 'hidden_act is "x", expected head_dim alone'),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_other_values_are_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, num_hidden_layers=3)
    edit_config(
        path,
        **{
            "architectures": ["DomynEdgeForCausalLM"],
            "window_sizes": [[6, 0]] * 3,
            "position_layers": ["rope"] * 3,
            **changes,
        },
    )
    with pytest.raises(OctavoError, match=said):
        read_config(path)
