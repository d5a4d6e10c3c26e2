"""etcd with certificates and users: let in, again when tokens expire, or kept out in one line."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization

from control_plane.etcd.client import EtcdClient
from control_plane.etcd.lease import Lease
from control_plane.etcd.prefix_watch import PrefixWatch
from control_plane.etcd.values import Deleted, KeyValue, Listing, Put
from core.clock import SystemClock
from core.config import ControlPlaneConfig
from core.errors import ConfigError, ControlPlaneError
from tests.etcd_server import Certificates, EtcdServer

pytestmark = pytest.mark.anyio

CLOCK = SystemClock()
USER, PASSWORD = "dovetail", "sesame-47"
KEY = "/dovetail/test/a"


@pytest.fixture(scope="module", autouse=True)
async def one_loop() -> AsyncGenerator[None]:
    """Run all tests on one loop: gRPC still tells things to that of a client just closed."""
    loop = asyncio.get_running_loop()
    yield
    assert asyncio.get_running_loop() is loop


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("etcd")


@pytest.fixture(scope="module")
def certificates(directory: Path) -> Certificates:
    return Certificates(directory / "certificates")


@pytest.fixture(scope="module")
def strangers(directory: Path) -> Certificates:
    """Of another CA."""
    return Certificates(directory / "strangers")


@pytest.fixture(scope="module")
def guarded(directory: Path, certificates: Certificates) -> Iterator[EtcdServer]:
    """TLS and users; a token (JWT, which no use prolongs) is good for a second."""
    key = serialization.load_pem_private_key(Path(certificates.server_key).read_bytes(), None)
    public = directory / "public.pem"
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    jwt = f"jwt,pub-key={public},priv-key={certificates.server_key},sign-method=RS256,ttl=1s"
    flags = {"auth-token": jwt, "bcrypt-cost": "4"}
    with EtcdServer(directory, flags=flags, tls=certificates, name="guarded") as server:
        server.add_users(USER, PASSWORD, "/dovetail/test/")
        yield server


@pytest.fixture(scope="module")
def mutual(directory: Path, certificates: Certificates) -> Iterator[EtcdServer]:
    """TLS on both sides, no users."""
    flags = certificates.mutual_flags
    with EtcdServer(directory, flags=flags, tls=certificates, name="mutual") as server:
        yield server


@pytest.fixture(scope="module")
def password_file(directory: Path) -> str:
    file = directory / "password"
    file.write_text(f"{PASSWORD}\n")
    return str(file)


@asynccontextmanager
async def client_of(config: ControlPlaneConfig) -> AsyncGenerator[EtcdClient]:
    client = EtcdClient(config, clock=CLOCK)
    await client.connect()
    try:
        yield client
    finally:
        await client.close()


class Heard:
    """A `PrefixListener` that only counts."""

    def __init__(self) -> None:
        self.num_listings = 0
        self.values: asyncio.Queue[bytes] = asyncio.Queue()

    def on_listing(self, listing: Listing, *, replay_from: int) -> int:
        self.num_listings += 1
        return listing.revision + 1

    def on_changes(self, changes: list[KeyValue | Deleted]) -> None:
        for change in changes:
            if isinstance(change, KeyValue):
                self.values.put_nowait(change.value)


async def test_tokens_expire_and_users_change_and_nothing_is_missed(
    guarded: EtcdServer,
    certificates: Certificates,
    password_file: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    config = ControlPlaneConfig(
        etcd=guarded.endpoint,
        etcd_ca_file=certificates.ca,
        etcd_user=USER,
        etcd_password_file=password_file,
    )
    heard = Heard()
    async with client_of(config) as client:
        lease = await Lease.grant(client, 1.0, clock=CLOCK)
        watch = PrefixWatch(client, KEY, heard, world_key="/dovetail/test/world")
        await watch.wait_listed()
        tokens: set[str | None] = set()
        number = 0
        while len(tokens) < 3:
            value = str(number).encode()
            await asyncio.gather(
                client.get(KEY), client.transaction({}, [Put(KEY, value, lease.id)])
            )
            assert await heard.values.get() == value
            if number == 10:  # JWTs carry the revision of the users, too
                await asyncio.to_thread(guarded.ctl, "role", "add", "another")
            tokens.add(client._session._token)
            number += 1
        assert not lease.is_lost
        assert heard.num_listings == 1
        await watch.close()
        await lease.revoke()
    assert [r.message for r in caplog.records if r.name.startswith("control_plane")] == []
    assert PASSWORD not in caplog.text


async def test_both_sides_have_certificates(mutual: EtcdServer, certificates: Certificates) -> None:
    config = ControlPlaneConfig(
        etcd=mutual.url,
        etcd_ca_file=certificates.ca,
        etcd_cert_file=certificates.client,
        etcd_key_file=certificates.client_key,
    )
    async with client_of(config) as client:
        assert await client.transaction({}, [Put(KEY, b"1")])


async def test_users_are_switched_on_while_it_runs(tmp_path: Path, password_file: str) -> None:
    with EtcdServer(tmp_path, flags={"bcrypt-cost": "4"}) as server:
        config = ControlPlaneConfig(
            etcd=server.url, etcd_user=USER, etcd_password_file=password_file
        )
        async with client_of(config) as client:
            assert await client.get(KEY) is None
            server.add_users(USER, PASSWORD, "/dovetail/")
            assert await client.get(KEY) is None
            assert client._session._token
            # A right that is taken away later is an outage: serving goes on
            server.ctl("role", "revoke-permission", "some", "/dovetail/", "--prefix")
            with pytest.raises(ControlPlaneError, match="permission denied") as raised:
                await client.get(KEY)
            assert not isinstance(raised.value, ConfigError)


SLIPS = {
    "wrong password": r"etcd_user = 'dovetail'.* does not take this user with the password from "
    r"control_plane\.etcd_password_file = '.*/wrong'",
    "unknown user": r"etcd_user = 'nobody'.* does not take this user",
    "no user": r"etcd_user = '': etcd at .* wants a user and a password",
    "another cluster": r"grant it read and write on the prefix /dovetail/other/",
    "wrong CA": r"etcd_ca_file = '.*': did not sign the certificate of etcd at 127\.0\.0\.1:",
    "no CA": r"etcd_ca_file = '': no CA that this machine knows signed .*: name its CA",
    "another name": r"the certificate of etcd at 127\.0\.0\.2:\d+ is for another host name",
    "no certificate": r"etcd_cert_file = '': etcd at .* wants a client's certificate",
    "a stranger's certificate": r"etcd_cert_file = '.*': .* wants a client's certificate of "
    r"another CA",
}


@pytest.fixture
def slips(
    guarded: EtcdServer,
    mutual: EtcdServer,
    certificates: Certificates,
    strangers: Certificates,
    password_file: str,
    directory: Path,
) -> dict[str, ControlPlaneConfig]:
    wrong = directory / "wrong"
    wrong.write_text("sesame")
    good = {
        "etcd": guarded.endpoint,
        "etcd_ca_file": certificates.ca,
        "etcd_user": USER,
        "etcd_password_file": password_file,
    }
    port = guarded.endpoint.rpartition(":")[2]
    both = {"etcd": mutual.endpoint, "etcd_ca_file": certificates.ca}
    stranger = {"etcd_cert_file": strangers.client, "etcd_key_file": strangers.client_key}
    return {
        name: msgspec.convert(settings, ControlPlaneConfig)
        for name, settings in {
            "wrong password": {**good, "etcd_password_file": str(wrong)},
            "unknown user": {**good, "etcd_user": "nobody"},
            "no user": {**good, "etcd_user": "", "etcd_password_file": ""},
            "another cluster": {**good, "cluster": "other"},
            "wrong CA": {**good, "etcd_ca_file": strangers.ca},
            "no CA": {**good, "etcd": guarded.url, "etcd_ca_file": ""},
            "another name": {**good, "etcd": f"127.0.0.2:{port}"},
            "no certificate": both,
            "a stranger's certificate": {**both, **stranger},
        }.items()
    }


@pytest.mark.parametrize("slip", SLIPS)
async def test_a_slip_is_told_once_in_one_line(
    slips: dict[str, ControlPlaneConfig], slip: str
) -> None:
    config = slips[slip]
    async with client_of(config) as client:
        line = await first_slip(client, f"/dovetail/{config.cluster}/world")
        assert re.search(SLIPS[slip], line), line
        assert line.startswith("control_plane.etcd")
        assert "\n" not in line
        assert PASSWORD not in line
        # Whoever else calls in the background is not told too: the process ends with one line
        with pytest.raises(ControlPlaneError):
            await client.get(f"/dovetail/{config.cluster}/world")


async def first_slip(client: EtcdClient, key: str) -> str:
    """Ask as those in the background do."""
    async with asyncio.timeout(20):
        while True:
            try:
                await client.get(key)
            except ConfigError as slip:
                return str(slip)
            except ControlPlaneError:
                await asyncio.sleep(0.05)
