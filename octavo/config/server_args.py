"""What `octavo serve` adds to the engine's arguments, each once, stated like those of `args`."""

from __future__ import annotations

import ipaddress

from octavo.config.fields import Arguments, arg
from octavo.core.request_limits import request_limits_in_short
from octavo.errors import ConfigError


class ServerArgs(Arguments, heading="Server"):
    """What a person wrote about the HTTP server."""

    host: str = arg("127.0.0.1", "Address to listen on; 0.0.0.0 lets other machines in.")
    port: int = arg(8000, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    api_server_count: int = arg(
        1,
        "Processes that speak HTTP and turn text into tokens, in front of the same engine cores. Limits for each "
        "key and for connections count in each of them.",
        ge=1,
        le=64,
    )
    uds: str | None = arg(None, "Path of a Unix socket to listen on, instead of host and port.")
    ssl_keyfile: str | None = arg(None, "PEM file with the private key of --ssl-certfile, if it is not in it.")
    ssl_certfile: str | None = arg(
        None, "PEM file with the server's certificate and those between it and its root; the server speaks HTTPS."
    )
    ssl_ca_certs: str | None = arg(
        None, "PEM file with the certificates that sign those of clients, for --ssl-cert-reqs."
    )
    ssl_cert_reqs: int = arg(
        0, "Certificates of clients: 0 asks for none, 1 checks one that is sent, 2 needs one.", ge=0, le=2
    )
    ssl_ciphers: str | None = arg(None, "Ciphers of TLS up to 1.2, in OpenSSL's format.")
    api_key: tuple[str, ...] = arg(
        (),
        "Key that clients must send; may be given several times. Without one everybody who can connect is served. "
        "Other users of the machine see it in the list of processes; give it as OCTAVO_API_KEY or in a file.",
        is_secret=True,
    )
    admin_api_key: tuple[str, ...] = arg(
        (),
        "Like api_key, for a key with all rights: it pins and resets cached prefixes, and sees metrics and the "
        "requests of every key.",
        is_secret=True,
    )
    api_key_file: str | None = arg(
        None, "YAML file with further keys, their names, rights, and groups that share cached prefixes."
    )
    public_metrics: bool = arg(False, "Answer /metrics without a key, where there are keys.")
    vllm_metrics: bool = arg(
        False, "Show the metrics that vLLM has under its names, too (vllm:...), for dashboards made for it."
    )
    max_body_size: int = arg(
        32 << 20, f"Largest request body, with a suffix such as 8MiB. {request_limits_in_short()}", ge=1, is_bytes=True
    )
    max_bodies_size: int | None = arg(
        None,
        "Most memory for request bodies of all connections together, those of up to 64 KiB not counted; one key, "
        "or without keys one address, may have half of it. By default eight times --max-body-size.",
        ge=1,
        is_bytes=True,
    )
    max_features_size: int = arg(
        4 << 30,
        "Most memory for what encoders read of the images and sounds of all open requests together, with a suffix such "
        "as 8GiB; one key, or without keys one address, may have half of it, but always one request. An hour of sound "
        "takes 115 to 184 MB.",
        ge=1,
        is_bytes=True,
    )
    max_header_size: int = arg(
        64 << 10, "Most bytes of a request's URL and headers together.", ge=256, le=16 << 20, is_bytes=True
    )
    header_timeout_s: float = arg(10.0, "Seconds within which the headers of a request must arrive.", gt=0, le=3600)
    body_timeout_s: float = arg(
        60.0,
        "Seconds in which the body of a request must arrive, after its headers; on /v1/realtime, in which more of an "
        "utterance, or its commit, must arrive.",
        gt=0,
        le=86400,
    )
    sse_keep_alive_interval: float = arg(
        15.0,
        "Seconds between comments in a streamed response that has nothing else to send, so that proxies do "
        "not close it while a request waits or a long prompt is computed; 0 sends none.",
        ge=0,
        le=3600,
    )
    max_connections_per_address: int = arg(
        1024,
        "Most open connections of one client's address, or of one /64 network of IPv6, including those that have "
        "not finished their TLS handshake. Beyond it GET /health is still answered.",
        ge=1,
    )
    trusted_proxies: tuple[str, ...] = arg(
        (),
        "Address or network, such as 10.0.0.0/8, of a proxy whose connections are not limited; its open requests "
        "are, by the client's address in X-Forwarded-For. May be given several times.",
    )
    allowed_origins: tuple[str, ...] = arg(
        (), "Web origin whose pages may call the server from a browser, or *; may be given several times."
    )
    allowed_methods: tuple[str, ...] = arg(
        ("GET", "POST"), "HTTP method that pages of other origins may use, or *; may be given several times."
    )
    allowed_headers: tuple[str, ...] = arg(
        ("*",), "Header that pages of other origins may send, or *; may be given several times."
    )
    allow_credentials: bool = arg(
        False, "Let pages of other origins send cookies and certificates; needs their origins by name."
    )
    allow_hosts: tuple[str, ...] = arg(
        (),
        "Name by which clients ask for the server, as in the Host header, or *; may be given several times. By "
        "default any name, but on a loopback address only localhost and the machine's name. Addresses always pass.",
    )
    shutdown_timeout_s: float = arg(
        10.0, "Seconds that open requests may take to finish after SIGTERM or Ctrl-C.", ge=0, le=86400
    )
    trust_request_chat_template: bool = arg(
        False, "Let requests send a chat template of their own, which is a program that runs on this machine."
    )
    allow_special_tokens_in_content: bool = arg(
        False,
        "Let a special token that a message spells, such as <|im_end|>, become that token; by default it is text, "
        "and only the chat template writes such tokens.",
    )
    otlp_traces_endpoint: str | None = arg(
        None,
        "URL of an OpenTelemetry collector, such as http://localhost:4318/v1/traces, that gets a span for each "
        "request (OTLP over HTTP). Needs the extra otel.",
    )
    tool_call_parser: str = arg(
        "auto",
        "How the model writes calls of tools: a name such as hermes; auto, which looks at the checkpoint; or none.",
    )
    reasoning_parser: str = arg(
        "auto",
        "How the model writes reasoning: a name such as deepseek_r1; auto, which looks at the checkpoint; or none.",
    )
    reasoning_effort_map: dict[str, str] = arg(
        {},
        'What chat templates get in place of a chat\'s reasoning_effort, as JSON, such as {"medium": "low"}; others '
        "stay as they are.",
    )
    enable_auto_tool_choice: bool = arg(
        True, "Let the model choose whether it calls a tool; without it a request must demand a call."
    )
    return_tokens_as_token_ids: bool = arg(
        False, "Write tokens of log-probabilities as token_id:123, unless a request has return_tokens_as_token_ids."
    )
    enable_force_include_usage: bool = arg(
        False, "End each stream with its token counts, as if the request had stream_options with include_usage."
    )
    exclude_tools_when_tool_choice_none: bool = arg(
        False,
        "Leave tools out of the prompt where tool_choice is none. By default they stay in it, so that all turns of "
        "a conversation share their beginning in the prefix cache.",
    )
    allow_runtime_lora_updating: bool = arg(
        False,
        "Let keys with the right operate load adapters of the folder --lora-resolver-cache-dir by other names, and "
        "unload adapters, while the server runs.",
    )
    log_requests: bool = arg(False, "Log a line for each HTTP request.")
    root_path: str = arg("", "Path under which a proxy serves octavo, whether it strips it or not.")

    def __post_init__(self) -> None:
        super().__post_init__()
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
            raise ConfigError(
                "ssl_cert_reqs needs ssl_ca_certs, the authorities that sign clients' certificates; give it, too"
            )
        if self.allow_runtime_lora_updating and self.api_server_count > 1:
            raise ConfigError(
                "allow_runtime_lora_updating cannot be combined with api_server_count, which is "
                f"{self.api_server_count}: one server would not know what another has loaded; leave one out, and put "
                "adapters into the folder of lora_resolver_cache_dir"
            )
        if self.uds is not None and self.ssl_certfile is not None:
            raise ConfigError("uds and ssl_certfile are set, but a Unix socket is for this machine alone; give one")
