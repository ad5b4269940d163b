"""A forward pass without data, which shows what the layers of a class ask of attention and of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from octavo.core.light_torch import import_meta_registrations
from octavo.errors import UnsupportedModel, one_line
from octavo.models.fallback.attention import NAME, RECORDED, Call, Unfit, register
from octavo.models.fallback.exact import Watch
from octavo.models.fallback.library import Library

_KINDS: Final = frozenset({"full_attention", "sliding_attention", "dense", "sparse", "moe", "attention"})
"""Values of `layer_types` that are attention over keys and values of the past."""
_CHANGING_ROPES: Final = frozenset({"dynamic", "longrope"})


class Recording(NamedTuple):
    """The findings of one forward pass."""

    causal: Any
    """The class's module, its weights on the meta device."""
    calls: dict[str, Call]
    """The calls by the path of their attention module, in the order of layers."""
    inexact: tuple[str, ...]
    """Paths of the modules that call functions of torch whose bits depend on the batch."""


def record(library: Library, where: str) -> Recording:
    """Run a forward pass of a few tokens on the meta device. Raises UnsupportedModel, which names the missing part.

    where: the config's file, for messages.
    """
    register()
    _check_config(library, where)
    refuse = _refusal(library, where)
    try:
        causal = library.without_weights(NAME)
        _check_modules(causal)
        watch = Watch(causal, Unfit)
        calls: dict[nn.Module, Call] = {}
        token = RECORDED.set(calls)
        try:
            _run(causal, watch)
        finally:
            RECORDED.reset(token)
    except Exception as error:  # an error of transformers' code: whatever its type, the class does not run in this way
        if isinstance(error, KeyError) and error.args == (NAME,):
            raise refuse("its attention has no interface by which it could be replaced") from error
        raise refuse(str(error) if isinstance(error, Unfit) else one_line(error)) from error
    num_layers = library.config.num_hidden_layers
    without = sorted(set(range(num_layers)) - {call.layer for call in calls.values()})
    if without or len(calls) != num_layers:
        raise refuse(f"layer {without[0] if without else num_layers} does not call attention once")
    paths = {module: path for path, module in causal.named_modules()}
    ordered = sorted(calls.items(), key=lambda item: item[1].layer)
    inexact = tuple(sorted(paths[module] for module in watch.callers))
    return Recording(causal, {paths[module]: call for module, call in ordered}, inexact)


def _check_modules(causal: Any) -> None:
    for path, module in causal.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.RNNBase):
            raise Unfit(f"{path} ({type(module).__name__}) mixes neighbouring tokens, of which no cache keeps the past")


def _run(causal: Any, watch: Watch) -> None:
    import_meta_registrations()
    ids = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    with torch.device("meta"), torch.inference_mode(), without_data(causal), _followed(causal, watch), watch:
        causal(**inputs(ids, torch.empty(1, 3, dtype=torch.int64, device="meta")))


def inputs(ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """Return the arguments for a call of a transformers model: ids and positions are [1, tokens].

    The mask says that no token is padding, which keeps transformers from looking for sequences by itself.
    """
    seen = torch.ones_like(ids, dtype=torch.bool)
    return {"input_ids": ids, "position_ids": positions, "attention_mask": seen, "use_cache": False}


@contextmanager
def _followed(causal: Any, watch: Watch) -> Iterator[None]:
    """Keep `watch.modules` at the modules that are being called, the innermost last."""
    hooks = []
    for module in causal.modules():
        hooks.append(module.register_forward_pre_hook(lambda each, _: watch.modules.append(each)))
        hooks.append(module.register_forward_hook(lambda *_: watch.modules.pop() and None))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def without_data(causal: nn.Module) -> Iterator[None]:
    """Put the buffers on the meta device, where the inputs are."""
    held = [(module, dict(module._buffers)) for module in causal.modules() if module._buffers]
    for module, buffers in held:
        for name, buffer in buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")
    try:
        yield
    finally:
        for module, buffers in held:
            module._buffers.update(buffers)


def _check_config(library: Library, where: str) -> None:
    config = library.config
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if kind not in _KINDS]
    if kinds:
        raise UnsupportedModel(
            f"{where}: octavo has no family for {library.model.__name__}, and its layer_types has {kinds[0]}, expected "
            f"{' or '.join(sorted(_KINDS))}: transformers' classes keep states of other kinds outside of attention"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if each.get("rope_type") in _CHANGING_ROPES:
            raise UnsupportedModel(
                f"{where}: rope_type is {each['rope_type']}; in transformers its frequencies follow the longest "
                "sequence of a batch, so a request would depend on its neighbours"
            )


def _refusal(library: Library, where: str) -> Any:
    name = library.model.__name__
    return lambda reason: UnsupportedModel(
        f"{where}: octavo has no family for {name}, and transformers' class cannot run over the paged cache: {reason}"
    )
