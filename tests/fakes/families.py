"""Small sizes of every family of text models, as transformers' classes take them."""

from __future__ import annotations

from typing import Any

from tests.fakes.sizes import BLOCKS, DELTA, GEMMA, GRANITE_SWA, LFM, MAMBA, QWEN_LINEAR, WIDE, WINDOWS_IN_TWO, of
from tests.fakes.sparse_families import SPARSE_FAMILIES

FAMILIES = {
    **SPARSE_FAMILIES,
    "arcee": of("Arcee", num_key_value_heads=2),
    "bitnet": of("BitNet", num_key_value_heads=2),
    "apertus": of("Apertus", num_key_value_heads=2),
    "apertus1p5": of("Apertus1p5Text", num_key_value_heads=2),
    "muse_glimmer": of(
        "MuseGlimmerText",
        WINDOWS_IN_TWO,
        model="MuseGlimmerForConditionalGeneration",
        num_key_value_heads=2,
        head_dim=8,
        layer_rope_theta=[10_000.0, 0, 10_000.0],
        final_logit_softcapping=5.0,
        output_multiplier=0.7,
    ),
    "nanochat": of("NanoChat", num_key_value_heads=2),
    "exaone": of("Llama", config="ExaoneConfig", num_key_value_heads=2),
    "bloom": of("Bloom"),
    "mpt": of("Mpt", max_seq_len=256),
    "falcon": of("Falcon", ffn_hidden_size=56),
    "gpt_bigcode": of("GPTBigCode"),
    "gpt_neo": of("GPTNeo", window_size=7, attention_types=[[["global", "local"], 1]]),
    "codegen": of("CodeGen", rotary_dim=4),
    "gptj": of("GPTJ", rotary_dim=4),
    "helium": of("Helium", num_key_value_heads=2, head_dim=8),
    "hyperclovax": of(
        "HyperCLOVAX",
        num_key_value_heads=2,
        embedding_multiplier=10.0,
        logits_scaling=0.125,
        residual_multiplier=0.6,
        attention_multiplier=0.15,
    ),
    "jais2": of("Jais2", num_key_value_heads=2),
    "olmo": of("Olmo", num_key_value_heads=2, clip_qkv=1.0),
    "vaultgemma": of("VaultGemma", GEMMA),
    "cwm": of("Cwm", WINDOWS_IN_TWO, WIDE),
    "bamba": of("Bamba", MAMBA, num_hidden_layers=3, attn_layer_indices=[1], num_key_value_heads=2),
    "cohere": of("Cohere", num_key_value_heads=2),
    "cohere2": of("Cohere2", WINDOWS_IN_TWO, num_key_value_heads=2),
    "hunyuan_v1_dense": of(
        "HunYuanDenseV1",
        WIDE,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0},
    ),
    "ernie4_5": of("Ernie4_5", WIDE),
    "exaone4": of("Exaone4", WINDOWS_IN_TWO, num_key_value_heads=2),
    "falcon_h1": of("FalconH1", MAMBA, num_key_value_heads=2, mamba_d_ssm=48, mamba_d_head=12),
    "gemma": of("Gemma", num_key_value_heads=1, head_dim=16),
    "gemma2": of("Gemma2", GEMMA),
    "gemma3": of("Gemma3", GEMMA, config="Gemma3TextConfig"),
    "gemma3n": of(
        "Gemma3n",
        config="Gemma3nTextConfig",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_key_value_heads=2,
        head_dim=8,  # scores are not scaled
        sliding_window=7,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=120,  # tokens behind these have the first one's embedding
        activation_sparsity_pattern=[0.8, 0.8, 0.0, 0.0, 0.6, 0.0],
        laurel_rank=8,
    ),
    "gemma4": of(
        "Gemma4",
        GEMMA,
        config="Gemma4TextConfig",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        head_dim=8,
        global_head_dim=16,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=300,
        use_double_wide_mlp=True,
    ),
    "glm": of("Glm", WIDE),
    "glm4": of("Glm4", WIDE),
    "gpt_neox": of("GPTNeoX"),
    "granite": of(
        "Granite",
        num_key_value_heads=2,
        embedding_multiplier=12.0,
        attention_multiplier=0.15,
        residual_multiplier=0.22,
        logits_scaling=6.0,
    ),
    "modernbert-decoder": of("ModernBertDecoder", num_hidden_layers=4, local_attention=14),
    "ministral": of("Ministral", WINDOWS_IN_TWO, num_key_value_heads=2, head_dim=8),
    "ministral3": of(
        "Ministral3",
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "mamba": of("Mamba", num_hidden_layers=3, state_size=8, time_step_rank=4),
    "falcon_mamba": of("FalconMamba", num_hidden_layers=3, state_size=8, time_step_rank=4, tie_word_embeddings=False),
    "mamba2": of("Mamba2", num_hidden_layers=3, num_heads=4, head_dim=16, state_size=8, n_groups=2),
    "minicpm": of(
        "Granite",
        num_key_value_heads=2,
        embedding_multiplier=12.0,
        attention_multiplier=8**-0.5,
        residual_multiplier=1.4 / 2**0.5,
        logits_scaling=32 / 20,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=20,
    ),
    "nemotron-nas": of("Llama", num_hidden_layers=5, block_configs=BLOCKS),
    "nemotron": of("Nemotron", num_key_value_heads=2),
    "zamba2": of(
        "Zamba2",
        num_hidden_layers=3,
        layers_block_type=["hybrid", "mamba", "hybrid"],
        n_mamba_heads=4,
        mamba_ngroups=2,
        mamba_d_state=8,
        adapter_rank=8,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
    ),
    "olmo2": of("Olmo2", num_key_value_heads=2),
    "olmo3": of("Olmo3", WINDOWS_IN_TWO, num_key_value_heads=2),
    "olmo_hybrid": of("OlmoHybrid", DELTA, rope_parameters={"rope_type": "default", "rope_theta": None}),
    "phi": of("Phi", num_key_value_heads=2),
    "phi3": of("Phi3", num_key_value_heads=2),
    "phi4_multimodal": of(
        "Phi4Multimodal",
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        vision_config={"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
        audio_config={"hidden_size": 16, "intermediate_size": 8, "num_blocks": 1, "num_attention_heads": 1}
        | {"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 8},
    ),
    "seed_oss": of("SeedOss", WIDE),
    "smollm3": of("SmolLM3", num_key_value_heads=2, num_hidden_layers=3, no_rope_layers=[1, 0, 1]),
    "stablelm": of("StableLm", num_key_value_heads=2, partial_rotary_factor=0.5),
    "starcoder2": of("Starcoder2", num_key_value_heads=2),
    "granite_swa": of(
        "GraniteSWA", GRANITE_SWA, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=6.0
    ),
    "lfm2": of("Lfm2", LFM),
    "lfm3": of(
        "Lfm3",
        WIDE,
        num_hidden_layers=4,
        layer_types=["conv", "sliding_attention", "conv", "full_attention"],
        conv_L_cache=3,
        sliding_window=7,
    ),
    "llama": of("Llama", num_key_value_heads=2),
    "mistral": of("Mistral", num_key_value_heads=2, head_dim=8, sliding_window=7),
    "qwen2": of("Qwen2", num_key_value_heads=1),
    "qwen3_5": of("Qwen3_5", QWEN_LINEAR, config="Qwen3_5TextConfig"),
    "qwen3": of("Qwen3", WIDE),
    "opt": of("OPT", ffn_dim=48, word_embed_proj_dim=32),
    "gpt2": of("GPT2", model="GPT2LMHeadModel"),
}
"""Family → transformers' config class, its model class, sizes of its own."""
OTHER_ARCHITECTURES = {
    "bailing_moe_v2": "BailingMoeV2ForCausalLM",
    "bailing_moe_v2_5": "BailingMoeV2_5ForCausalLM",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "muse_glimmer": "MuseGlimmerForCausalLM",
    "nemotron-nas": "DeciLMForCausalLM",
    "sarvam_mla": "SarvamMLAForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
}
"""Architectures of the hub whose class in transformers has another name."""

_DEBERTA = {"relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
_DEBERTA |= {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
_ENCODERS = [
    "Albert",
    "Bert",
    "DistilBert",
    "Electra",
    "Ernie",
    "Gte",
    "JinaEmbeddingsV3",
    "MPNet",
    "ModernBert",
    "NomicBert",
    "Roberta",
    "XLMRoberta",
]
ENCODERS = {family.lower(): of(family, model=f"{family}Model") for family in _ENCODERS}
ENCODERS["debertav2"] = of("DebertaV2", _DEBERTA, model="DebertaV2Model")
ENCODERS["embedding_gemma2"] = of(
    "EmbeddingGemma2Text",
    model="EmbeddingGemma2Model",
    head_dim=16,
    num_key_value_heads=2,
    global_head_dim=16,
    num_global_key_value_heads=1,
    hidden_size_per_layer_input=8,
    embedding_dim=24,
    sliding_window=7,
)
ENCODERS["openai_privacy_filter"] = of(
    "OpenAIPrivacyFilter",
    model="OpenAIPrivacyFilterModel",
    num_key_value_heads=2,
    head_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=5,
)
"""Families that make vectors, whose tokens see those behind them."""
WITH_ENCODERS = {
    "cohere_asr": of(
        "CohereAsr",
        model="CohereAsrForConditionalGeneration",
        encoder_config={
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 40,
            "subsampling_conv_channels": 8,
            "num_mel_bins": 16,
        },
    ),
    "moonshine": of(
        "Moonshine",
        model="MoonshineForConditionalGeneration",
        encoder_num_hidden_layers=2,
        num_attention_heads=2,
        encoder_num_attention_heads=2,
    ),
    "whisper": of(
        "Whisper",
        model="WhisperForConditionalGeneration",
        encoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        num_mel_bins=8,
        max_source_positions=37,
        decoder_start_token_id=3,
        begin_suppress_tokens=None,
    ),
}
"""Likewise, families that read sound."""

ALWAYS = ("gemma3", "gpt2", "llama", "mistral", "opt", "qwen2", "qwen3")
"""Families that are run in every way; of the others, which share their parts, tests run a selection."""

ALTERNATING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
"""Overrides for families with `layer_types`: layers with a window alternate with layers that see all."""
