"""Who we are to etcd and how we know it: files and a password, read once and kept from every log.

The password comes from a file or from the environment, never from the configuration itself: that
is copied to each child process, and printed.
"""

from __future__ import annotations

import dataclasses
import ssl
from pathlib import Path

import grpc

from control_plane.etcd.endpoints import Endpoints
from core.config import ControlPlaneConfig
from core.environment import ETCD_PASSWORD, etcd_password
from core.errors import ConfigError


@dataclasses.dataclass(frozen=True, repr=False)
class Credentials:
    """What a connection needs. It has no `repr` that could end in a log.

    Attributes:
        tls: None: in the clear.
        user: empty: etcd has no users.
        password_from: where the password came from, for complaints.
    """

    tls: grpc.ChannelCredentials | None = None
    user: str = ""
    password: str = ""
    password_from: str = ""


def read_credentials(config: ControlPlaneConfig, endpoints: Endpoints) -> Credentials:
    """Read the files and the password that the configuration names.

    Raises:
        ConfigError: names the key, its file, and what is wrong with it.
    """
    tls = _tls(config) if endpoints.is_tls else None
    if not config.etcd_user:
        return Credentials(tls)
    password, source = _password(config)
    return Credentials(tls, config.etcd_user, password, source)


def _tls(config: ControlPlaneConfig) -> grpc.ChannelCredentials:
    ca = _read("etcd_ca_file", config.etcd_ca_file)
    certificate = _read("etcd_cert_file", config.etcd_cert_file)
    key = _read("etcd_key_file", config.etcd_key_file)
    _check_pem(config)
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _check_pem(config: ControlPlaneConfig) -> None:
    """Refuse here what gRPC would refuse at every attempt to connect, and hardly say why."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if config.etcd_ca_file:
        try:
            context.load_verify_locations(config.etcd_ca_file)
        except ssl.SSLError:
            msg = (
                f"control_plane.etcd_ca_file = {config.etcd_ca_file!r}: "
                "must hold certificates in PEM format"
            )
            raise ConfigError(msg) from None
    if config.etcd_cert_file:
        try:
            context.load_cert_chain(config.etcd_cert_file, config.etcd_key_file, password=_nothing)
        except (ssl.SSLError, ValueError):
            msg = (
                f"control_plane.etcd_cert_file = {config.etcd_cert_file!r}: must hold a "
                "certificate in PEM format, and control_plane.etcd_key_file = "
                f"{config.etcd_key_file!r} its unencrypted key"
            )
            raise ConfigError(msg) from None


def _nothing() -> str:
    """Answer for the user whom OpenSSL would ask for a key's password at the terminal."""
    return ""


def _password(config: ControlPlaneConfig) -> tuple[str, str]:
    if config.etcd_password_file:
        source = f"control_plane.etcd_password_file = {config.etcd_password_file!r}"
        try:
            read = (_read("etcd_password_file", config.etcd_password_file) or b"").decode()
        except UnicodeDecodeError:
            msg = f"{source}: must hold text in UTF-8"
            raise ConfigError(msg) from None
        password = read.removesuffix("\n").removesuffix("\r")
    else:
        source, password = ETCD_PASSWORD, etcd_password()
    if not password:
        msg = (
            f"control_plane.etcd_user = {config.etcd_user!r}: needs a password, in "
            f"{ETCD_PASSWORD} or in control_plane.etcd_password_file"
        )
        raise ConfigError(msg)
    return password, source


def _read(key: str, file: str) -> bytes | None:
    if not file:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        msg = f"control_plane.{key} = {file!r}: {error.strerror}"
        raise ConfigError(msg) from None
