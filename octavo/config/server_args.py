"""What `octavo serve` adds to the engine's arguments, each once, annotated like those of `args`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated, ClassVar

from octavo.config.fields import Arg, check_values, names_its_arguments
from octavo.core.request_limits import request_limits_in_short
from octavo.errors import ConfigError


@names_its_arguments
@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """What a person wrote about the HTTP server."""

    heading: ClassVar = "Server"

    host: Annotated[str, Arg("Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1"
    port: Annotated[int, Arg("Port to listen on; 0 takes a free one.", ge=0, le=65535)] = 8000
    api_server_count: Annotated[
        int,
        Arg(
            "Processes that speak HTTP and turn text into tokens, in front of the same engine cores. Limits for each "
            "key and for connections count in each of them.",
            ge=1,
            le=64,
        ),
    ] = 1
    uds: Annotated[str | None, Arg("Path of a Unix socket to listen on, instead of host and port.")] = None
    ssl_keyfile: Annotated[str | None, Arg("PEM file with the private key of --ssl-certfile, if it is not in it.")] = (
        None
    )
    ssl_certfile: Annotated[
        str | None,
        Arg("PEM file with the server's certificate and those between it and its root; the server speaks HTTPS."),
    ] = None
    ssl_ca_certs: Annotated[
        str | None, Arg("PEM file with the certificates that sign those of clients, for --ssl-cert-reqs.")
    ] = None
    ssl_cert_reqs: Annotated[
        int, Arg("Certificates of clients: 0 asks for none, 1 checks one that is sent, 2 needs one.", ge=0, le=2)
    ] = 0
    ssl_ciphers: Annotated[str | None, Arg("Ciphers of TLS up to 1.2, in OpenSSL's format.")] = None
    api_key: Annotated[
        tuple[str, ...],
        Arg(
            "Key that clients must send; may be given several times. Without one everybody who can connect is served. "
            "Other users of the machine see it in the list of processes; give it as OCTAVO_API_KEY or in a file.",
            is_secret=True,
        ),
    ] = ()
    admin_api_key: Annotated[
        tuple[str, ...],
        Arg(
            "Like api_key, for a key with all rights: it pins and resets cached prefixes, and sees metrics and the "
            "requests of every key.",
            is_secret=True,
        ),
    ] = ()
    api_key_file: Annotated[
        str | None, Arg("YAML file with further keys, their names, rights, and groups that share cached prefixes.")
    ] = None
    public_metrics: Annotated[bool, Arg("Answer /metrics without a key, where there are keys.")] = False
    vllm_metrics: Annotated[
        bool, Arg("Show the metrics that vLLM has under its names, too (vllm:...), for dashboards made for it.")
    ] = False
    max_body_size: Annotated[
        int, Arg(f"Largest request body, with a suffix such as 8MiB. {request_limits_in_short()}", ge=1, is_bytes=True)
    ] = 32 << 20
    max_bodies_size: Annotated[
        int | None,
        Arg(
            "Most memory for request bodies of all connections together, those of up to 64 KiB not counted; one key, "
            "or without keys one address, may have half of it. By default eight times --max-body-size.",
            ge=1,
            is_bytes=True,
        ),
    ] = None
    max_header_size: Annotated[
        int, Arg("Most bytes of a request's URL and headers together.", ge=256, le=16 << 20, is_bytes=True)
    ] = 64 << 10
    header_timeout_s: Annotated[float, Arg("Seconds in which the headers of a request must arrive.", gt=0, le=3600)] = (
        10.0
    )
    body_timeout_s: Annotated[
        float, Arg("Seconds in which the body of a request must arrive, after its headers.", gt=0, le=86400)
    ] = 60.0
    max_connections_per_address: Annotated[
        int,
        Arg(
            "Most open connections of one client's address, or of one /64 network of IPv6. Beyond it GET /health is "
            "still answered.",
            ge=1,
        ),
    ] = 1024
    trusted_proxies: Annotated[
        tuple[str, ...],
        Arg(
            "Address or network, such as 10.0.0.0/8, of a proxy whose connections are not limited; its open requests "
            "are, by the client's address in X-Forwarded-For. May be given several times."
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Arg("Web origin whose pages may call the server from a browser, or *; may be given several times."),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...], Arg("HTTP method that pages of other origins may use, or *; may be given several times.")
    ] = ("GET", "POST")
    allowed_headers: Annotated[
        tuple[str, ...], Arg("Header that pages of other origins may send, or *; may be given several times.")
    ] = ("*",)
    allow_credentials: Annotated[
        bool, Arg("Let pages of other origins send cookies and certificates; needs their origins by name.")
    ] = False
    allow_hosts: Annotated[
        tuple[str, ...],
        Arg(
            "Name by which clients ask for the server, as in the Host header, or *; may be given several times. By "
            "default any name, but on a loopback address only localhost and the machine's name. Addresses always pass."
        ),
    ] = ()
    shutdown_timeout_s: Annotated[
        float, Arg("Seconds that open requests may take to finish after SIGTERM or Ctrl-C.", ge=0, le=86400)
    ] = 10.0
    trust_request_chat_template: Annotated[
        bool, Arg("Let a request bring its own chat template, a program that runs here.")
    ] = False
    allow_special_tokens_in_content: Annotated[
        bool,
        Arg(
            "Let a special token that a message spells, such as <|im_end|>, become that token; by default it is text, "
            "and only the chat template writes such tokens."
        ),
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        Arg(
            "URL of an OpenTelemetry collector, such as http://localhost:4318/v1/traces, that gets a span for each "
            "request (OTLP over HTTP). Needs the extra otel."
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        Arg(
            "How the model writes calls of tools: a name such as hermes; auto, which looks at the checkpoint; or none."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Arg(
            "How the model writes reasoning: a name such as deepseek_r1; auto, which looks at the checkpoint; or none."
        ),
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool, Arg("Let the model choose whether it calls a tool; without it a request must demand a call.")
    ] = True
    return_tokens_as_token_ids: Annotated[
        bool,
        Arg("Write tokens of log-probabilities as token_id:123, unless a request has return_tokens_as_token_ids."),
    ] = False
    exclude_tools_when_tool_choice_none: Annotated[
        bool,
        Arg(
            "Leave tools out of the prompt where tool_choice is none. By default they stay in it, so that all turns of "
            "a conversation share their beginning in the prefix cache."
        ),
    ] = False
    allow_runtime_lora_updating: Annotated[
        bool,
        Arg(
            "Let keys with the right operate load adapters of the folder --lora-resolver-cache-dir by other names, and "
            "unload adapters, while the server runs."
        ),
    ] = False
    log_requests: Annotated[bool, Arg("Log a line for each HTTP request.")] = False
    root_path: Annotated[str, Arg("Path under which a proxy serves octavo, whether it strips it or not.")] = ""

    def __post_init__(self) -> None:
        check_values(self)
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                message = f"trusted_proxies: {error}; give an address or a network, such as 10.0.0.0/8"
                raise ConfigError(message) from error
        if self.max_bodies_size is not None and self.max_bodies_size < self.max_body_size:
            raise ConfigError(
                f"max_bodies_size is {self.max_bodies_size:,}, must be at least max_body_size ({self.max_body_size:,})"
            )
        if self.otlp_traces_endpoint is not None and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_traces_endpoint is {self.otlp_traces_endpoint!r}; give a URL that begins with http:// or "
                "https://, such as http://localhost:4318/v1/traces"
            )
        if self.allow_credentials and (not self.allowed_origins or "*" in self.allowed_origins):
            raise ConfigError("allow_credentials needs allowed_origins with the origins themselves, not *; name them")
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"):
            if getattr(self, name) and self.ssl_certfile is None:
                raise ConfigError(f"{name} needs ssl_certfile, the certificate of the server; give it, too")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("ssl_cert_reqs needs ssl_ca_certs, which sign the certificates of clients; give it, too")
        if self.allow_runtime_lora_updating and self.api_server_count > 1:
            raise ConfigError(
                f"allow_runtime_lora_updating does not go with api_server_count, which is {self.api_server_count}: one "
                "server would not know what another has loaded; leave one out, and put adapters into the folder of "
                "lora_resolver_cache_dir"
            )
        if self.uds is not None and self.ssl_certfile is not None:
            raise ConfigError("uds does not go with ssl_certfile: a Unix socket is of this machine alone; give one")
