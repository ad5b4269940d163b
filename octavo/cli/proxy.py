"""`octavo proxy [MODEL]`: the server of engines on other machines."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from octavo.cli.link import hello_of, with_secret
from octavo.cli.options import Given, with_options
from octavo.cli.start import mention_demonstration_model
from octavo.config.args import EngineArgs
from octavo.config.fields import Arguments, arg, arguments
from octavo.config.schema import EngineConfig
from octavo.config.server_args import ServerArgs
from octavo.core.process.authentication import read_secret
from octavo.engine.cores.core_link import CoreAddress
from octavo.engine.cores.remote_replicas import Engine, RemoteReplicas, read_engines
from octavo.engine.cores.replicas import Replicas
from octavo.errors import ConfigError
from octavo.server.serving import serve as serve_http

_OF_A_FRONT = (
    *("model", "tokenizer", "revision", "tokenizer_revision", "served_model_name", "model_source", "download_dir"),
    *("max_model_len", "seed", "max_logprobs", "max_num_seqs"),
    *("generation_config", "override_generation_config", "hf_overrides", "mmproj"),
    *("chat_template", "default_chat_template_kwargs"),
    *("max_queued_requests", "prefill_tokens_per_s", "router", "split_min_tokens", "kv_lease_s"),
    *("enable_lora", "lora_modules", "lora_resolver_cache_dir", "enable_prompt_embeds"),
    *("disable_log_stats", "log_level", "cluster_secret_file", "distributed_timeout_seconds"),
)
"""The arguments of an engine that its front uses, too."""


class ProxyOptions(Arguments, heading="Engines"):
    """The engines of a proxy."""

    prefill: tuple[str, ...] = arg(
        (), "Where an engine with --role prefill listens, as host:port; may be given several times."
    )
    decode: tuple[str, ...] = arg(
        (), "Where an engine with --role decode listens, as host:port; may be given several times."
    )
    engines: str | None = arg(
        None,
        "File of further engines, with a line `prefill host:port` or `decode host:port` for each. It is read again "
        "when it changes: engines come and go, and requests go on.",
    )

    def named(self) -> list[Engine]:
        """Return the engines that are named. Raises ConfigError for a wrong address, or when none can decode."""
        roles = {"prefill": self.prefill, "decode": self.decode}
        found = [Engine(role, CoreAddress.read(text)) for role, texts in roles.items() for text in texts]
        if not self.decode and self.engines is None:
            raise ConfigError("no decode engine is named; name one with --decode host:port, or a file with --engines")
        return found


_OF_AN_ENGINE = set(arguments(EngineArgs)).difference(_OF_A_FRONT, arguments(ProxyOptions))


@with_options(ProxyOptions, ServerArgs, EngineArgs, without=_OF_AN_ENGINE, model="positional")
def proxy(*, given: Given) -> int:
    """Serve a model over HTTP with engines that `octavo serve --role` runs, on this machine or others."""
    options = given.own(ProxyOptions)
    named, file = options.named(), None if options.engines is None else Path(options.engines)
    hosts = [engine.address.host for engine in named + ([] if file is None else read_engines(file))]
    given = given.without(ProxyOptions)
    args = with_secret(given.arguments(EngineArgs), hosts)
    # the engines have the weights; a configuration file may serve them, too
    args = dataclasses.replace(args, load_format="dummy", packed_cache="auto", role=None, prefill=0, decode=0)

    async def start(config: EngineConfig) -> Replicas:
        mention_demonstration_model(args)  # the address is the proxy's
        secret, hello = read_secret(args.cluster_secret_file), hello_of(config.model)
        engines = RemoteReplicas(named, file, secret, hello, timeout_s=args.distributed_timeout_seconds)
        return await engines.start(config)

    return serve_http(args, given.arguments(ServerArgs), start)
