"""Endpoints, files and passwords as the user gives them: read, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from cryptography.hazmat.primitives import serialization

from control_plane.etcd.client import EtcdClient
from control_plane.etcd.credentials import read_credentials
from control_plane.etcd.endpoints import read_endpoints
from core.clock import ManualClock
from core.config import ControlPlaneConfig, load
from core.errors import ConfigError
from tests.etcd_server import Certificates


def config(**settings: str) -> ControlPlaneConfig:
    return msgspec.convert({"etcd": "127.0.0.1:2379", **settings}, ControlPlaneConfig)


@pytest.mark.parametrize(
    ("etcd", "names", "is_tls"),
    [
        ("127.0.0.1:2379", ("127.0.0.1:2379",), False),
        (" a.b-c:1 , [::1]:65535,", ("a.b-c:1", "[::1]:65535"), False),
        ("http://a:1/,b:2", ("a:1", "b:2"), False),
        ("https://a:1,b:2", ("a:1", "b:2"), True),
    ],
)
def test_endpoints_are_read_as_etcd_writes_them(
    etcd: str, names: tuple[str, ...], is_tls: bool
) -> None:
    found = read_endpoints(config(etcd=etcd))
    assert (found.names, found.is_tls) == (names, is_tls)


@pytest.mark.parametrize("key", ["etcd_ca_file", "etcd_cert_file"])
def test_a_certificate_means_tls(key: str) -> None:
    assert read_endpoints(config(**{key: "x.pem"})).is_tls
    with pytest.raises(ConfigError, match=f"must be https, since {key} is set"):
        read_endpoints(config(etcd="http://a:1", **{key: "x.pem"}))


@pytest.mark.parametrize(
    "etcd",
    ["a", "a:", ":1", "a:0", "a:65536", "a:b", "ftp://a:1", "://a:1", "a:1;b:2", "http://a:1/x"],
)
def test_what_is_no_endpoint_is_named(etcd: str) -> None:
    with pytest.raises(ConfigError, match=r"control_plane\.etcd: '.*' must be HOST:PORT") as raised:
        EtcdClient(config(etcd=f"good:1,{etcd}"), clock=ManualClock())
    assert "\n" not in str(raised.value)


def test_schemes_must_agree() -> None:
    with pytest.raises(ConfigError, match="all endpoints must be http, or all https"):
        read_endpoints(config(etcd="http://a:1,https://b:2"))


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"etcd": "a:1", "etcd_cert_file": "c"}, "etcd_key_file"),
        ({"etcd": "a:1", "etcd_key_file": "k"}, "etcd_cert_file"),
        ({"etcd": "a:1", "etcd_password_file": "p"}, "etcd_user"),
        ({"etcd_ca_file": "ca"}, "etcd"),
        ({"etcd_user": "u"}, "etcd"),
        ({"etcd_cert_file": "c", "etcd_key_file": "k"}, "etcd"),
    ],
)
def test_half_a_pair_is_refused(settings: dict[str, str], needed: str) -> None:
    with pytest.raises(ConfigError, match=rf"needs control_plane\.{needed} too"):
        load({"control_plane": settings})


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def read(**settings: str) -> Any:
    given = config(**settings)
    return read_credentials(given, read_endpoints(given))


def test_without_any_there_are_none() -> None:
    found = read()
    assert (found.tls, found.user, found.password) == (None, "", "")


def test_certificates_are_read(certificates: Certificates) -> None:
    for settings in (
        {"etcd_ca_file": certificates.ca},
        {
            "etcd_ca_file": certificates.ca,
            "etcd_cert_file": certificates.client,
            "etcd_key_file": certificates.client_key,
        },
        {"etcd": "https://a:1"},  # what the machine trusts
    ):
        assert isinstance(read(**settings).tls, grpc.ChannelCredentials)


def encrypted(key_file: str, directory: Path) -> str:
    key = serialization.load_pem_private_key(Path(key_file).read_bytes(), None)
    file = directory / "encrypted.key"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"x"),
        )
    )
    return str(file)


def test_files_that_cannot_be_used_are_named(certificates: Certificates, tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.write_bytes(b"\xff no PEM")
    pair = {"etcd_cert_file": certificates.client, "etcd_key_file": certificates.client_key}
    cases = (
        ({"etcd_ca_file": "/none"}, r"etcd_ca_file = '/none': No such file"),
        ({"etcd_ca_file": str(tmp_path)}, r"etcd_ca_file = .*: Is a directory"),
        ({"etcd_ca_file": str(junk)}, r"etcd_ca_file = .*: must hold certificates in PEM format"),
        ({**pair, "etcd_key_file": "/none"}, r"etcd_key_file = '/none': No such file"),
        ({**pair, "etcd_cert_file": str(junk)}, r"etcd_cert_file = .*junk'.* in PEM format"),
        ({**pair, "etcd_key_file": certificates.server_key}, r"etcd_key_file = .* its unencr"),
        ({**pair, "etcd_key_file": encrypted(certificates.client_key, tmp_path)}, "unencrypted"),
        ({"etcd_user": "u", "etcd_password_file": "/none"}, r"etcd_password_file = '/none': No"),
        ({"etcd_user": "u", "etcd_password_file": str(junk)}, r"must hold text in UTF-8"),
    )
    for settings, line in cases:
        with pytest.raises(ConfigError, match=line) as raised:
            read(**settings)
        assert "\n" not in str(raised.value)


def test_a_password_comes_from_its_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_ETCD_PASSWORD", "from the environment")
    found = read(etcd_user="u")
    assert (found.user, found.password) == ("u", "from the environment")
    assert found.password_from == "DOVETAIL_ETCD_PASSWORD"
    file = tmp_path / "password"
    file.write_text(" kept as it is \r\n")
    found = read(etcd_user="u", etcd_password_file=str(file))
    assert found.password == " kept as it is "
    assert "kept" not in f"{found} {found!r}"


@pytest.mark.parametrize(
    ("etcd", "is_warned"),
    [("10.0.0.1:2379,[::1]:2379", True), ("https://10.0.0.1:2379", False), ("[::1]:2379", False)],
)
def test_a_password_in_the_clear_is_warned_of(
    etcd: str, is_warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DOVETAIL_ETCD_PASSWORD", "sesame-47")
    EtcdClient(config(etcd=etcd, etcd_user="u"), clock=ManualClock())
    assert ("goes to 10.0.0.1:2379 unencrypted" in caplog.text) == is_warned
    assert "sesame" not in caplog.text


def test_the_configuration_has_no_place_for_a_password() -> None:
    """It is written for child processes, and `--set` shows in every list of processes."""
    with pytest.raises(ConfigError, match="did you mean 'etcd_password_file'"):
        load({"control_plane": {"etcd_password": "sesame"}})


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_a_user_needs_a_password(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_ETCD_PASSWORD", "")
    settings = {"etcd_user": "u"}
    if content is not None:
        (tmp_path / "password").write_text(content)
        settings["etcd_password_file"] = str(tmp_path / "password")
    with pytest.raises(ConfigError, match=r"etcd_user = 'u': needs a password, in DOVETAIL_ETCD"):
        read(**settings)
