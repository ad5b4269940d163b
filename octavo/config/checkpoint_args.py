"""What a person may set in the place of what a checkpoint's files say, its chat template too; parts of `ModelArgs`."""

from __future__ import annotations

from typing import Any

from octavo.config.fields import ArgumentGroup, arg


class CheckpointArgs(ArgumentGroup, heading="Checkpoint"):
    """Values of `config.json` and `generation_config.json`."""

    generation_config: str = arg(
        "auto",
        "Where sampling defaults come from: auto is the checkpoint's generation_config.json, none is octavo's own, "
        "anything else is a directory or file to read.",
    )
    override_generation_config: dict[str, Any] = arg(
        {}, 'Sampling defaults in the place of those of generation_config, as JSON, such as {"temperature": 0.5}.'
    )
    enable_sleep_mode: bool = arg(
        False,
        "Let the engine give back the memory of its weights and KV cache, and take other weights, without a new "
        "start: sleep, wake_up, update_weights_from_disk.",
    )
    enable_prompt_embeds: bool = arg(
        False, "Take prompts that are given as vectors in place of those of tokens: prompt_embeds."
    )
    hf_overrides: dict[str, Any] = arg(
        {},
        'Values in the place of those of the checkpoint\'s config.json, as JSON, such as {"rope_scaling": '
        '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}.',
    )


class ChatArgs(ArgumentGroup, heading="Chats"):
    """What renders conversations, and with which values."""

    chat_template: str | None = arg(None, "Chat template instead of the checkpoint's: a file or its text.")
    default_chat_template_kwargs: dict[str, Any] = arg(
        {},
        'Values that chat templates get unless a chat has others: an object of JSON, such as {"enable_thinking": '
        "false}.",
    )
