"""LLM.embed, encode, classify and score: vectors as transformers' hidden states give them, alone and in any batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.pooling.read_pooling import pooling_config
from octavo.core.pooling import PoolingParams
from octavo.errors import CheckpointError, ConfigError, InvalidRequest, UnsupportedModel
from octavo.llm import LLM
from tests.fakes.checkpoints import edit_config, edit_tensors
from tests.fakes.vector_models import save, write_modules, write_splade, write_tokenizer
from tests.fakes.whole_engines import started

TEXTS = ["w1 w2 w3", "w4", " ".join(f"w{number * 7 % 96}" for number in range(70)), "w9 w8 w7 w6 w5 w4 w3 w2"]


def ids_of(llm: LLM, text: str) -> Tensor:
    return torch.tensor([llm.get_tokenizer().encode(text)])


def hidden_of(model: Any, ids: Tensor) -> Tensor:
    """The last hidden states [tokens, hidden] by transformers."""
    with torch.inference_mode():
        hidden: Tensor = model.base_model(input_ids=ids).last_hidden_state[0]
    return hidden


def check_vectors(llm: LLM, expected: Callable[[Tensor], Tensor], **arguments: Any) -> None:
    """All texts have the expected vectors, alone the same bits as together."""
    together = llm.embed(TEXTS, **arguments)
    for text, output in zip(TEXTS, together, strict=True):
        assert output.error is None
        with torch.inference_mode():
            want = expected(ids_of(llm, text))
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-5)
    assert [llm.embed(text, **arguments)[0].outputs for text in TEXTS] == [output.outputs for output in together]


def normalized(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


QWEN = {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}


def test_causal_model_with_dense_layer_in_pieces_and_after_hits(tmp_path: Path) -> None:
    model = save(tmp_path, "Qwen3Model", **QWEN)
    dense = torch.nn.Linear(64, 32)
    write_modules(tmp_path, "lasttoken", "Dense", "Normalize", dense=dense)
    with LLM(str(tmp_path), max_num_batched_tokens=16, max_num_seqs=4) as llm:
        check_vectors(llm, lambda ids: normalized(torch.tanh(dense(hidden_of(model, ids)[-1]))))
        assert llm.embed(TEXTS[2])[0].num_cached_tokens >= 64
        short = llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=8))[0].outputs.embedding
        whole = torch.tensor(llm.embed(TEXTS[0])[0].outputs.embedding)
        torch.testing.assert_close(torch.tensor(short), normalized(whole[:8]))
        scores = llm.score(TEXTS[0], TEXTS)
        assert scores[0].outputs.score == pytest.approx(1.0)
        assert all(each.outputs.score < 0.999 for each in scores[1:])
        with pytest.raises(InvalidRequest, match="made for embed"):
            llm.classify("w1")
        (refused,) = llm.generate("w1")
        assert refused.error is not None
        assert refused.error.code == "unsupported_task"


@pytest.mark.parametrize("few", [{"num_gpu_blocks_override": 10}, {"num_gpu_blocks_override": 12, "swap_space": 0.0}])
def test_few_blocks_and_other_prompts_leave_no_trace(tmp_path: Path, few: dict[str, Any]) -> None:
    save(tmp_path, "Qwen3Model", **QWEN)
    write_modules(tmp_path, "lasttoken", "Normalize")
    texts = [" ".join(f"w{(number * step) % 96}" for number in range(20 * step)) for step in (6, 1, 5, 3, 6, 2)]
    with LLM(str(tmp_path), enable_prefix_caching=False) as llm:
        alone = [llm.embed(text)[0].outputs for text in texts]
    with LLM(str(tmp_path), max_num_batched_tokens=24, max_num_seqs=6, **few) as llm:
        for order in (texts, texts[::-1]):
            found = {output.outputs.embedding[0]: output.outputs for output in llm.embed(order)}
            assert set(found) == {each.embedding[0] for each in alone}
            assert all(found[each.embedding[0]] == each for each in alone)


def test_a_person_may_say_what_is_pooled(tmp_path: Path) -> None:
    model = save(tmp_path, "Qwen3Model", **QWEN)
    for given, expected in (
        ({"pooling_type": "MEAN"}, lambda hidden: normalized(hidden.mean(0))),
        ({"seq_pooling_type": "CLS", "use_activation": False}, lambda hidden: hidden[0]),
    ):
        with LLM(str(tmp_path), pooler_config=given) as llm:
            check_vectors(llm, lambda ids, expected=expected: expected(hidden_of(model, ids)))
    for given in ({"pooling_type": "ALL"}, {"task": "token_embed"}):
        with LLM(str(tmp_path), pooler_config=given) as llm:
            (output,) = llm.encode(TEXTS[0])
            want = normalized(hidden_of(model, ids_of(llm, TEXTS[0]))).numpy()
            np.testing.assert_allclose(output.outputs.data, want, rtol=1e-5, atol=1e-5)
    for given, message in (
        ({"pooling": "MEAN"}, "pooler_config has pooling, expected one of pooling_type"),
        ({"pooling_type": "MAX"}, 'pooler_config: "MAX" is no type, expected CLS'),
        ({"use_activation": 1}, "use_activation is 1, expected bool"),
        ({"task": "classify"}, 'task is "classify", but this model makes embed, token_embed'),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(tmp_path), pooler_config=given)


def test_scores_of_steps_by_the_token_that_ends_them(tmp_path: Path) -> None:
    model = save(tmp_path, "BertForSequenceClassification", num_labels=2, pad_token_id=0)
    with LLM(str(tmp_path), pooler_config={"pooling_type": "STEP", "step_tag_id": 5}) as llm:
        (output,) = llm.encode("w1 w2 w1")
        with torch.inference_mode():
            hidden = hidden_of(model, ids_of(llm, "w1 w2 w1"))
            scores = model.classifier(torch.tanh(model.bert.pooler.dense(hidden))).softmax(-1)
        np.testing.assert_allclose(output.outputs.data, scores[[1, 3]].numpy(), rtol=1e-5, atol=1e-5)


def test_old_files_prompts_and_a_mean_of_a_causal_model(tmp_path: Path) -> None:
    model = save(tmp_path, "Qwen3ForCausalLM", **QWEN)
    write_modules(tmp_path, {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True})
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "w90 w91 ", "document": ""}, "default_prompt_name": None})
    )
    with LLM(str(tmp_path)) as llm:
        assert not llm.config.cache.enable_prefix_caching
        check_vectors(llm, lambda ids: hidden_of(model, ids).mean(0))
        named = llm.embed("w1", prompt_name="query")[0]
        assert named.outputs == llm.embed("w90 w91 w1")[0].outputs
        with pytest.raises(InvalidRequest, match="prompt_name is 'passage', must be a prompt of the checkpoint"):
            llm.embed("w1", prompt_name="passage")
        rows = llm.encode(TEXTS[0], pooling_task="token_embed")[0].outputs.data
        np.testing.assert_allclose(rows, hidden_of(model, ids_of(llm, TEXTS[0])).numpy(), rtol=1e-5, atol=1e-5)


def test_a_text_model_makes_vectors_when_asked_and_text_otherwise(tmp_path: Path) -> None:
    model = save(tmp_path, "Qwen3ForCausalLM", **QWEN)
    with LLM(str(tmp_path), runner="pooling") as llm:
        check_vectors(llm, lambda ids: normalized(hidden_of(model, ids)[-1]))
        fits = llm.embed("w1 " * 128)[0]
        assert len(fits.prompt_token_ids) == 130
        (long,) = llm.embed("w1 " * 129)
        assert long.outputs is None
        assert long.error is not None
        assert "131 tokens, but this model's maximum context length is 130" in long.error.message
        params = PoolingParams(truncate_prompt_tokens=3, truncation_side="left")
        assert llm.encode("w1 w2 w3", params)[0].prompt_token_ids == [1, 7, 2]
        cut = llm.embed("w1 w2 w3", truncate_prompt_tokens=3)[0]
        assert cut.prompt_token_ids == [1, 5, 2]
    with LLM(str(tmp_path)) as llm:
        assert llm.generate("w1")[0].error is None
        with pytest.raises(InvalidRequest, match=r"does not embed; start it with runner pooling and convert embed"):
            llm.embed("w1")
        with pytest.raises(
            InvalidRequest, match=r"does not classify; start it with runner pooling and convert classify"
        ):
            llm.classify("w1")


def test_scores_of_labels_from_the_last_token(tmp_path: Path) -> None:
    model = save(tmp_path, "Qwen3ForSequenceClassification", **QWEN, num_labels=3)
    with LLM(str(tmp_path)) as llm:
        together = llm.classify(TEXTS)
        for text, output in zip(TEXTS, together, strict=True):
            with torch.inference_mode():
                want = model(input_ids=ids_of(llm, text)).logits[0].softmax(-1)
            torch.testing.assert_close(torch.tensor(output.outputs.probs), want, rtol=1e-5, atol=1e-5)
        assert [llm.classify(text)[0].outputs for text in TEXTS] == [output.outputs for output in together]
        raw = llm.classify(TEXTS[0], pooling_params=PoolingParams(use_activation=False))[0]
        assert sum(raw.outputs.probs) != pytest.approx(1.0)
    text_of = "{{{{ messages | selectattr('role', 'eq', '{}') | map(attribute='content') | first }}}}"
    (tmp_path / "chat_template.jinja").write_text(" w9 ".join(map(text_of.format, ("query", "document"))))
    with LLM(str(tmp_path)) as llm:
        assert llm.engine.input.pair_prompt("w1", "w2").text == "w1 w9 w2"


@pytest.mark.parametrize("family", ["Bert", "XLMRoberta", "ModernBert", "Qwen3"])
def test_scores_of_labels_for_each_token(tmp_path: Path, family: str) -> None:
    own: dict[str, Any] = {"Qwen3": QWEN, "ModernBert": {"local_attention": 16}}.get(family, {})
    model = save(tmp_path, f"{family}ForTokenClassification", **own, num_labels=3)
    with LLM(str(tmp_path)) as llm:
        together = llm.encode(TEXTS)
        for output in together:
            with torch.inference_mode():
                want = model(input_ids=torch.tensor([output.prompt_token_ids])).logits[0].softmax(-1)
            np.testing.assert_allclose(output.outputs.data, want.numpy(), rtol=1e-5, atol=1e-5)
        alone = [llm.encode(text, pooling_task="token_classify")[0].outputs.data for text in TEXTS]
        assert all((one == output.outputs.data).all() for one, output in zip(alone, together, strict=True))
        with pytest.raises(InvalidRequest, match="task is classify, .* made for token_classify; POST /pooling"):
            llm.classify("w1")


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "Roberta"])
@pytest.mark.parametrize(("strategy", "function"), [("max", "relu"), ("sum", "log1p_relu")])
def test_weights_of_all_tokens_of_the_vocabulary(tmp_path: Path, family: str, strategy: str, function: str) -> None:
    own = {"n_layers": 2, "n_heads": 4, "dim": 64, "hidden_dim": 96} if family == "DistilBert" else {}
    model = save(tmp_path, f"{family}ForMaskedLM", **own)
    write_splade(tmp_path, strategy, function)

    def expected(ids: Tensor) -> Tensor:
        weights = model(input_ids=ids).logits[0].relu().log1p()
        weights = weights.log1p() if function == "log1p_relu" else weights
        return weights.amax(0) if strategy == "max" else weights.sum(0)

    with LLM(str(tmp_path)) as llm:
        check_vectors(llm, expected)
        (refused,) = llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=8))
        assert refused.error is not None
        assert "dimensions is 8, but weights of tokens have none" in refused.error.message


def test_a_server_refuses_more_values_than_it_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "BertModel")
    monkeypatch.setattr("octavo.core.request_limits.MAX_POOLED_VALUES", 300)
    asked = [
        (["w1"] * 5, PoolingParams(), "320 values together, must have at most 300"),
        (["w1"] * 4, PoolingParams(), None),
        (["w1 w2 w3"], PoolingParams(task="token_embed"), "320 values together"),
        (["w1 w2 w3"], PoolingParams(task="token_embed", dimensions=60), None),
    ]

    async def check() -> None:
        async with started(model=str(tmp_path)) as llm:
            for texts, params, message in asked:
                with nullcontext() if message is None else pytest.raises(InvalidRequest, match=message):
                    assert len([each async for each in llm.generate_together(texts, params)]) == len(texts)

    asyncio.run(check())


@pytest.mark.parametrize(("kind", "num_labels"), [("Reward", 1), ("ProcessReward", 2)])
def test_rewards_of_tokens_or_steps(tmp_path: Path, kind: str, num_labels: int) -> None:
    model = save(tmp_path, "Qwen2Model", num_key_value_heads=2)
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, num_labels))
    edit_tensors(tmp_path, **{f"score.{name}": value.detach() for name, value in head.named_parameters()})
    edit_config(tmp_path, architectures=[f"Qwen2For{kind}Model"])
    with LLM(str(tmp_path), max_num_batched_tokens=16, max_num_seqs=4) as llm:
        for output in llm.encode(TEXTS):
            with torch.inference_mode():
                want = head(hidden_of(model, torch.tensor([output.prompt_token_ids])))
            if kind == "ProcessReward":  # the vocabulary of this model has no token that ends a step
                want = want.softmax(-1)[:0]
            np.testing.assert_allclose(output.outputs.data, want.numpy(), rtol=1e-5, atol=1e-5)


PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n'
    "<Query>: w7\n<Document>: w8<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def test_a_decoder_that_judges_by_its_next_token_gets_the_template_it_was_trained_with(tmp_path: Path) -> None:
    model = save(tmp_path, "Qwen3ForCausalLM", **QWEN)
    write_tokenizer(tmp_path, ends=False, words=("yes", "no"))
    with LLM(str(tmp_path), convert="classify", max_num_batched_tokens=16, max_num_seqs=4) as llm:
        yes, no = (llm.get_tokenizer().token_id(word) for word in ("yes", "no"))
        for output in [*llm.score("w7", ["w8", "w9"]), *llm.score("w7", ["w8"])]:
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([output.prompt_token_ids])).logits[0, -1]
            assert output.outputs.score == pytest.approx(torch.sigmoid(logits[yes] - logits[no]).item(), rel=1e-5)
        asked = llm.engine.input.pair_prompt("w7", "w8")
        assert asked.text == PROMPT.format("Given a web search query, retrieve relevant passages that answer the query")
        assert llm.engine.input.pair_prompt("w7", "w8", "Judge.").text == PROMPT.format("Judge.")


def test_files_may_name_the_tokens_and_have_a_template_for_pairs(tmp_path: Path) -> None:
    model = save(tmp_path, "Qwen3ForCausalLM", **QWEN)
    modules = [
        {"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""},
        {"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1_LogitScore"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 20, "false_token_id": 21}))
    text_of = '{{{{ messages | selectattr("role", "eq", "{}") | map(attribute="content") | first }}}}'
    (tmp_path / "chat_template.jinja").write_text(" ".join(map(text_of.format, ("system", "query", "document"))))
    with LLM(str(tmp_path)) as llm:
        (output,) = llm.score("w1 w2", "w3")
        ids = [*llm.get_tokenizer().encode("w1 w2 w3", add_special_tokens=False)]
        assert output.prompt_token_ids == ids
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        assert output.outputs.score == pytest.approx(torch.sigmoid(logits[20] - logits[21]).item(), rel=1e-5)
        assert llm.engine.input.pair_prompt("w1", "w2", "w9").text == "w9 w1 w2"


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"modules.json": "{}"}, CheckpointError, "is no list of modules"),
        ({"modules.json": "[" * 50_000}, CheckpointError, "is no list of modules"),
        ({"modules.json": '[{"type": "a.CNN", "path": "1"}]'}, UnsupportedModel, 'type is "CNN", expected Transformer'),
        ({"modules.json": '[{"type": "a.Pooling", "path": "../x"}]'}, CheckpointError, "expected a folder"),
        ({"1_Pooling/config.json": '{"pooling_mode": "median"}'}, CheckpointError, "pooling_mode is .*expected one or"),
        ({"1_Pooling/config.json": "{}"}, CheckpointError, "pooling_mode is missing"),
        ({"1_Pooling/config.json": '{"include_prompt": false}'}, UnsupportedModel, "include_prompt is false"),
        ({"config_sentence_transformers.json": '{"prompts": {"a": 1}}'}, CheckpointError, "expected an object from"),
    ],
)
def test_files_that_say_something_else_are_refused_by_name(
    tmp_path: Path, files: dict[str, str], error: type[Exception], message: str
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3Model"], "model_type": "qwen3", "hidden_size": 64})
    )
    write_modules(tmp_path, "mean")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        LLM(str(tmp_path), load_format="dummy")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"id2label": 5}, "id2label is 5, expected an object"),
        ({"num_labels": 10**9}, "num_labels is 1000000000, expected an integer of at most 65536"),
        ({"model_type": "roberta", "pad_token_id": 99}, "pad_token_id is 99, expected 0 to 98"),
        ({"model_type": "roberta", "pad_token_id": -1}, "pad_token_id is -1, expected 0 to 98"),
        ({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 21}, r"the tokens \(20, 21\), expected .* 0 to 20"),
    ],
)
def test_configs_of_scores_of_no_model_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    own = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "max_position_embeddings": 100}
    if "vocab_size" in values:
        own["model_type"] = "qwen3"
        (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Transformer"}, {"type": "a.LogitScore"}]))
        values = values | {"true_token_id": 20, "false_token_id": 21}
    (tmp_path / "config.json").write_text(json.dumps(own | values))
    with pytest.raises(CheckpointError, match=message):
        pooling_config(EngineArgs(model=str(tmp_path)), Checkpoint.open(tmp_path))


def test_arguments_without_effect_on_vectors_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "Qwen3Model", **QWEN)
    for arguments, message in (
        ({"speculative_config": {"method": "ngram"}}, "speculative_config is set"),
        ({"convert": "classify"}, "convert is classify, but Qwen3Model has no scores of labels, and its tokenizer no"),
        ({"runner": "generate", "convert": "embed"}, "convert is embed, but runner is generate"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(tmp_path), **{"runner": "pooling", **arguments})
