"""What a person may set about scheduling; a part of `args`."""

from __future__ import annotations

from typing import Literal

from octavo.config.fields import ArgumentGroup, arg

PreemptionMode = Literal["auto", "recompute", "swap", "classic"]


class SchedulerArgs(ArgumentGroup, heading="Scheduling"):
    """How many tokens and sequences a step has, and in which order requests get them."""

    max_num_seqs: int = arg(256, "Most sequences in one step.", ge=1, le=1 << 16)
    max_num_batched_tokens: int = arg(2048, "Most tokens in one step.", ge=1, le=1 << 24)
    long_prefill_token_threshold: int = arg(
        0,
        "Most tokens of one prompt in a step, so that several long prompts are computed side by side and "
        "short ones do not wait for them; 0 is no limit.",
        ge=0,
        le=1 << 24,
    )
    stream_interval: int = arg(
        1, "Least tokens of a sequence in each event of a stream; the first token is sent at once.", ge=1
    )
    target_step_ms: float | None = arg(
        None,
        "Most milliseconds of a step that computes prompts while other requests decode: prompts are cut into "
        "chunks for it; 0 is no limit. By default 2.5 times the time of a step that only decodes, and at "
        "least 20; 0 for LLM.",
        ge=0,
        le=1e6,
    )
    enable_chunked_prefill: bool = arg(
        True, "Compute long prompts in chunks, together with decoding; off, a step is all prefill or all decode."
    )
    scheduling_policy: Literal["fcfs", "priority", "fair-share", "deadline", "prefix-match"] = arg(
        "fcfs",
        "Which waiting request is next, and which running one is preempted: first come first served, priority "
        "(smaller numbers first), fair-share (least served tenant), deadline (who must start soonest), "
        "prefix-match (who finds most in the prefix cache).",
    )
    priority_ageing: float = arg(
        0.0, "Seconds of waiting that raise a request by one priority; 0 switches ageing off.", ge=0, le=1e9
    )
    tenant_weights: dict[str, float] = arg(
        {},
        "Shares of tenants under fair-share, such as alice=2; others have 1. A server's tenants are its API keys, "
        "by the names that --api-key-file gives them, or without keys what requests name as user.",
    )
    max_bypasses: int = arg(
        0,
        "How many later requests may be admitted before a waiting one that does not fit yet; 0 keeps the order.",
        ge=0,
        le=1 << 20,
    )
    delay_factor: float = arg(
        0.0,
        "Without chunked prefill: prompts wait until the first has waited this many times the last prefill's time.",
        ge=0,
        le=1000,
    )
    max_queued_requests: int | None = arg(
        None,
        "Most requests that wait; a server refuses further ones. Those that start in the next step do not "
        "count. An engine in process (LLM) refuses none.",
        ge=1,
    )
    max_queued_tokens: int | None = arg(
        None,
        "Most prompt tokens that wait; a server refuses a request that would exceed them, unless no other "
        "request waits. Those that start in the next step do not count. An engine in process (LLM) refuses "
        "none.",
        ge=1,
    )
    prefill_tokens_per_s: float | None = arg(
        None,
        "Prompt tokens computed per second, as deadlines, refusals and preemption_mode auto reckon; measured while "
        "running unless it is given.",
        gt=0,
        le=1e9,
    )
    swap_bytes_per_s: float | None = arg(
        None,
        "Bytes of keys and values moved per second between device and host, as preemption_mode auto reckons; "
        "measured while running unless it is given.",
        gt=0,
        le=1e13,
    )
    num_lookahead_slots: int = arg(
        0, "Token slots reserved for each running sequence beyond its next token.", ge=0, le=1 << 10
    )
    preemption_mode: PreemptionMode = arg(
        "auto",
        "How a preempted request frees its blocks: recompute them later, swap them to the host, classic "
        "(requests with several sequences swap, others recompute), or auto, whichever takes less time.",
    )
    max_steps_in_flight: int | None = arg(
        None,
        "Steps planned before the tokens of earlier ones are known. By default as many as "
        "pipeline_parallel_size, so that every stage has one, and 2 on a GPU.",
        ge=1,
        le=8,
    )
