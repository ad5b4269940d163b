"""What the proof says of transformers' classes for text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config.checkpoint import Checkpoint
from octavo.devices.reference.attention import ReferenceBackend
from octavo.errors import UnsupportedModel
from octavo.models import loader
from octavo.models.fallback.library import open_library
from octavo.models.fallback.model import FallbackModel
from octavo.models.fallback.proof import proved
from octavo.ops.registry import bind
from tests.fakes.strangers import make_stranger

_LATENT: dict[str, Any] = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    "num_key_value_heads": 4,
    "topk_group": 1,
    "n_shared_experts": 1,
}
PROVED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "glm": {},
    "glm4": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 16},
    "granite": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "llama": {},
    "minimax_m2": {},
    "ministral": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {},
    "afmoe": {},
    "beam": {},
    "cohere2_moe": {},
    "ctrl": {},
    "cwm": {},
    "exaone_moe": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hyperclovax": {},
    "jais2": {},
    "kolibri1": {},
    "laguna": {},
    "mellum": {},
    "modernbert-decoder": {},
    "nanochat": {},
    "axk1": {**_LATENT, "n_group": 1},
    "dots1": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "minicpm3": {name: value for name, value in _LATENT.items() if not name.startswith(("topk", "n_shared"))},
    "deepseek_v2": {**_LATENT, "n_group": 2, "first_k_dense_replace": 1},
    "deepseek_v3": {**_LATENT, "n_group": 2, "first_k_dense_replace": 1},
    "glm4_moe": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "glm4_moe_lite": {**_LATENT, "n_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
}
REFUSED = {
    "bloom": "computes baddbmm, whose bits depend on the batch",
    "diffllama": "layer 0 attends twice",
    "gpt_oss": "layer 0 has attention sinks",
    "git": "its attention has no interface by which it could be replaced",
    "lfm2": "Lfm2ForCausalLM.* cannot run over the paged cache",
    "llama4_text": "layer_types has chunked_attention",
    "qwen3_next": "layer_types has linear_attention",
    "xglm": "computes bmm, whose bits depend on the batch",
}
AT_ONCE = ("llama4_text", "qwen3_next")
"""For the others a file of transformers has to be imported."""


@pytest.fixture(autouse=True)
def without_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small copies are run by the fallback, where octavo has a family too."""
    monkeypatch.setattr(loader, "resolve_model", lambda checkpoint, **how: FallbackModel)


def verdict(path: Path) -> str:
    return proved(open_library(Checkpoint.open(path)), str(path), bind(), lambda _: ReferenceBackend(), None)


@pytest.mark.long
@pytest.mark.parametrize("model_type", PROVED)
def test_a_class_is_proved_to_compute_what_it_computes_alone(model_type: str, tmp_path: Path) -> None:
    path = make_stranger(model_type, tmp_path, **PROVED[model_type])
    assert verdict(path).startswith("proved: at most")


@pytest.mark.parametrize(
    "model_type", [each if each in AT_ONCE else pytest.param(each, marks=pytest.mark.long) for each in REFUSED]
)
def test_a_class_that_cannot_run_over_the_paged_cache_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    path = make_stranger(model_type, tmp_path, with_weights=False)
    with pytest.raises(UnsupportedModel, match=REFUSED[model_type]):
        verdict(path)
