"""Encoders that know places by distance compute what transformers or the paper say, alone the same bits as together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from octavo.errors import UnsupportedModel
from octavo.layers.distance import alibi_slopes
from octavo.llm import LLM
from tests.fakes.checkpoints import edit_config
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vector_models import SIZES, save, write_modules, write_tokenizer
from tests.models.test_encoders import TEXTS, hidden_of

LONG = [*TEXTS[:2], " ".join(f"w{number * 7 % 96}" for number in range(200))]


def test_ranks_have_the_biases_of_their_heads(tmp_path: Path) -> None:
    for make in (lambda path: save(path, "MPNetModel"), lambda path: random_jina(path, is_for_code=False)):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        make(folder)
        write_modules(folder, "mean")
        with LLM(str(folder)) as llm:
            expected = [output.outputs for output in llm.embed(TEXTS)]
        with llm_of_ranks(folder, 2) as llm:
            assert [output.outputs for output in llm.embed(TEXTS)] == expected


@pytest.mark.parametrize("device", ["auto", "reference"])
def test_mpnet_is_that_of_transformers(tmp_path: Path, device: str) -> None:
    model = save(tmp_path, "MPNetModel", max_position_embeddings=260)
    write_modules(tmp_path, "mean")
    with LLM(str(tmp_path), device=device, max_num_batched_tokens=512) as llm:
        assert llm.config.model.max_model_len == 258
        together = llm.embed(LONG)
        for output in together:
            places = torch.arange(len(output.prompt_token_ids))[None] + 2  # the token 1 stands for padding in MPNet
            want = hidden_of(model, output.prompt_token_ids, position_ids=places).mean(0)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-5)
        assert [llm.embed(text)[0].outputs for text in LONG] == [output.outputs for output in together]
    edit_config(tmp_path, relative_attention_num_buckets=64)
    with pytest.raises(UnsupportedModel, match="relative_attention_num_buckets is 64, expected 32"):
        LLM(str(tmp_path), device=device)


def test_mpnet_scores_pairs(tmp_path: Path) -> None:
    model = save(tmp_path, "MPNetForSequenceClassification", num_labels=1)
    with LLM(str(tmp_path)) as llm:
        together = llm.score("w20 w21", TEXTS)
        for output in together:
            ids = torch.tensor([output.prompt_token_ids])
            with torch.inference_mode():
                logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None] + 2).logits
            assert output.outputs.score == pytest.approx(torch.sigmoid(logits[0, 0]).item(), rel=1e-5, abs=1e-6)
        assert [llm.score("w20 w21", text)[0].outputs for text in TEXTS] == [output.outputs for output in together]


def random_jina(path: Path, *, is_for_code: bool) -> dict[str, Tensor]:
    """Write a small JinaBERT v2 with the names of its releases, and return its tensors."""
    generator, hidden, width = torch.Generator().manual_seed(5), 64, 96
    norms, shapes = ["embeddings.LayerNorm"], {"embeddings.word_embeddings": (100, hidden)}
    shapes |= {"embeddings.token_type_embeddings": (2, hidden), "pooler.dense": (hidden, hidden)}
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        shapes |= {f"{layer}.attention.{part}": (hidden, hidden) for part in ("self.query", "self.key", "self.value")}
        up, down = ("up_gated_layer", "down_layer") if is_for_code else ("gated_layers", "wo")
        shapes |= {f"{layer}.attention.output.dense": (hidden, hidden), f"{layer}.mlp.{up}": (2 * width, hidden)}
        shapes[f"{layer}.mlp.{down}"] = (hidden, width)
        plain = ["attention.output.LayerNorm", "mlp.layernorm"]
        code = ["layer_norm_1", "layer_norm_2", "attention.self.layer_norm_q", "attention.self.layer_norm_k"]
        norms += [f"{layer}.{name}" for name in (code if is_for_code else plain)]
    made = {f"{name}.weight": torch.randn(*shape, generator=generator) / 6 for name, shape in shapes.items()}
    without = ("embeddings", "up_gated_layer", "gated_layers")
    made |= {f"{name}.bias": torch.randn(shape[0], generator=generator) / 6
             for name, shape in shapes.items() if not any(part in name for part in without)}  # fmt: skip
    for name in norms:
        made[f"{name}.weight"], made[f"{name}.bias"] = torch.randn(2, hidden, generator=generator) * 0.2 + 1
    save_file(made, path / "model.safetensors")
    code = "jinaai/jina-bert-v2-qk-post-norm" if is_for_code else "jinaai/jina-bert-implementation"
    config: dict[str, Any] = SIZES | {"architectures": ["JinaBertForMaskedLM"], "model_type": "bert"}
    config |= {"position_embedding_type": "alibi", "feed_forward_type": "geglu", "num_attention_heads": 4}
    config |= {
        "hidden_act": "gelu",
        "type_vocab_size": 2,
        "auto_map": {"AutoModel": f"{code}--modeling_bert.JinaBertModel"},
    }
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    return made


def jina_states(t: dict[str, Tensor], token_ids: list[int], *, is_for_code: bool) -> Tensor:
    """Return what the releases' code computes, [tokens, hidden]."""

    def normed(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (64,), t[f"{name}.weight"], t[f"{name}.bias"], 1e-12)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    x = t["embeddings.word_embeddings.weight"][token_ids] + t["embeddings.token_type_embeddings.weight"][0]
    x, count = normed(x, "embeddings.LayerNorm"), len(token_ids)
    places = torch.arange(count)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None]
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        q, k, v = (linear(x, f"{layer}.attention.self.{part}") for part in ("query", "key", "value"))
        if is_for_code:
            q, k = normed(q, f"{layer}.attention.self.layer_norm_q"), normed(k, f"{layer}.attention.self.layer_norm_k")
        q, k, v = (each.view(count, 4, 16).transpose(0, 1) for each in (q, k, v))
        scores = q @ k.transpose(1, 2) / 4 - slopes * (places[:, None] - places).abs()
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, 64)
        after, behind = (
            ("layer_norm_1", "layer_norm_2") if is_for_code else ("attention.output.LayerNorm", "mlp.layernorm")
        )
        x = normed(x + linear(attended, f"{layer}.attention.output.dense"), f"{layer}.{after}")
        first, second = linear(x, f"{layer}.mlp.{'up_gated_layer' if is_for_code else 'gated_layers'}").chunk(2, -1)
        inner = first * F.gelu(second) if is_for_code else F.gelu(first) * second
        x = normed(x + linear(inner, f"{layer}.mlp.{'down_layer' if is_for_code else 'wo'}"), f"{layer}.{behind}")
    return x


@pytest.mark.parametrize("is_for_code", [False, True])
def test_jina_bert_is_that_of_its_releases(tmp_path: Path, is_for_code: bool) -> None:
    tensors = random_jina(tmp_path, is_for_code=is_for_code)
    write_modules(tmp_path, "mean")
    with LLM(str(tmp_path), max_num_batched_tokens=256) as llm:
        together = llm.embed(TEXTS)
        for output in together:
            want = jina_states(tensors, output.prompt_token_ids, is_for_code=is_for_code).mean(0)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-5)
        assert [llm.embed(text)[0].outputs for text in TEXTS] == [output.outputs for output in together]


@pytest.mark.parametrize("heads", [4, 6, 12])
def test_slopes_are_those_of_bloom(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom", reason="transformers has the slopes")
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), bloom._get_alibi_slopes(heads, torch.device("cpu")))
