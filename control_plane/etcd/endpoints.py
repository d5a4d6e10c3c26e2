"""`control_plane.etcd` read: which members to talk to, and whether over TLS. Pure."""

from __future__ import annotations

import re

import msgspec

from core.config import ControlPlaneConfig
from core.errors import ConfigError

_HOST_AND_PORT = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]):([0-9]{1,5})")


class Endpoints(msgspec.Struct, frozen=True):
    """The members of an etcd cluster.

    Attributes:
        names: host:port each, at least one, in the order given.
        is_tls: whether all are spoken to over TLS; none is otherwise.
    """

    names: tuple[str, ...]
    is_tls: bool


def read_endpoints(config: ControlPlaneConfig) -> Endpoints:
    """Read the comma-separated list; each may begin with http:// or https://, as etcd writes them.

    TLS it is where they say https, or where a CA or a certificate of ours is named.

    Raises:
        ConfigError: no endpoint, one that is no host:port, or schemes that contradict.
    """
    parts = [part.strip() for part in config.etcd.split(",") if part.strip()]
    if not parts:
        msg = "control_plane.etcd = '': name at least one endpoint, such as 127.0.0.1:2379"
        raise ConfigError(msg)
    split = [_split(part) for part in parts]
    schemes = {scheme for scheme, _ in split if scheme}
    if len(schemes) > 1:
        msg = f"control_plane.etcd = {config.etcd!r}: all endpoints must be http, or all https"
        raise ConfigError(msg)
    wants_tls = bool(config.etcd_ca_file or config.etcd_cert_file)
    if wants_tls and schemes == {"http"}:
        key = "etcd_ca_file" if config.etcd_ca_file else "etcd_cert_file"
        msg = f"control_plane.etcd = {config.etcd!r}: must be https, since {key} is set"
        raise ConfigError(msg)
    names = tuple(name for _, name in split)
    return Endpoints(names, is_tls=wants_tls or schemes == {"https"})


def _split(part: str) -> tuple[str, str]:
    """Return an endpoint's scheme, which may be missing, and its host:port."""
    scheme, separator, name = part.rpartition("://")
    match = _HOST_AND_PORT.fullmatch(name.removesuffix("/"))
    is_known = scheme in ("http", "https") if separator else True
    if match is None or not is_known or not 0 < int(match[2]) <= 65535:
        msg = (
            f"control_plane.etcd: {part!r} must be HOST:PORT, such as 127.0.0.1:2379, "
            "or https://HOST:PORT"
        )
        raise ConfigError(msg)
    return scheme, match[0]
