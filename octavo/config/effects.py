"""Finds arguments that have no effect beside others, or that others rule out: their caller expects an effect."""

from __future__ import annotations

from typing import Any, Final

from octavo.config.args import EngineArgs

_NEEDS: Final = (
    (("delay_factor",), "enable_chunked_prefill", False, "switch chunked prefill off"),
    (
        ("max_bypasses", "target_step_ms", "long_prefill_token_threshold"),
        "enable_chunked_prefill",
        True,
        "enable chunked prefill",
    ),
    (("priority_ageing",), "scheduling_policy", "priority", "choose the policy priority"),
    (("tenant_weights",), "scheduling_policy", "fair-share", "choose the policy fair-share"),
    (
        ("max_cpu_loras", "enable_lora_experts", "lora_modules", "lora_resolver_cache_dir"),
        *("enable_lora", True, "give enable_lora"),
    ),
)
"""Arguments, off (0, or empty) by default, that do something only where another one has this value, and the remedy."""

_KEEP_WEIGHTS: Final = {
    "role": "other engines fetch what the weights computed",
    "prefill": "other cores fetch what the weights computed",
    "kv_disk": "it keeps what the weights computed",
    "kv_host_size": "it keeps what the weights computed",
    "record_trace": "it does not record other weights",
}
"""Arguments with which no engine sleeps, and why."""


def _text(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if isinstance(value, dict):
        return ",".join(f"{key}={each:g}" for key, each in value.items())
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def without_effect(args: EngineArgs) -> dict[str, str]:
    """Return the arguments that are not off and can do nothing beside the others, by name: why, and what to do."""
    found = {}
    for names, other, needed, remedy in _NEEDS:
        actual = getattr(args, other)
        for name in names if actual != needed else ():
            if value := getattr(args, name):
                without = f"has no effect where {other} is {actual}; {remedy}, or leave it out"
                found[name] = f"{name} is {_text(value)}, but {without}"
    if args.allow_requantize and args.quantization is None:
        found["allow_requantize"] = (
            "allow_requantize is set, but has no effect without quantization; give quantization, or leave it out"
        )
    for name, because in _KEEP_WEIGHTS.items() if args.enable_sleep_mode else ():
        if getattr(args, name):
            found["enable_sleep_mode"] = f"enable_sleep_mode is set, and so is {name}: {because}; leave one of them out"
    if args.enable_sleep_mode and (args.nnodes > 1 or args.executor == "ray"):
        found["enable_sleep_mode"] = "enable_sleep_mode is set, and ranks may be on other machines; use one machine"
    if args.executor == "ray" and args.tensor_parallel_size * args.pipeline_parallel_size == 1:
        found["executor"] = (
            "executor is ray, but has no effect on a model of one rank, which the core computes itself; give "
            "tensor_parallel_size or pipeline_parallel_size, or leave it out"
        )
    if args.preemption_mode == "swap" and not args.swap_space:
        found["preemption_mode"] = (
            f"preemption_mode is swap, but has no effect where swap_space is {args.swap_space:g}; give swap space, or "
            "choose preemption_mode recompute"
        )
    return found
