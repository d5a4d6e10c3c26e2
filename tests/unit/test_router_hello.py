"""What a router says first: which workers may take its requests."""

from __future__ import annotations

import shutil
from pathlib import Path

from control_plane.rpc.handshake import difference
from core.config import Config
from core.ids import Boot
from core.worker_record import Hello
from deploy.options import RouterOptions
from deploy.router_process import router_hello
from engine.models.read_spec import read_spec
from tests.router_server import smollm2_path


def hello_of_worker(model_fingerprint: str) -> Hello:
    return Hello(
        kind="worker",
        name="decode-0",
        boot=Boot("b" * 32),
        cluster="default",
        model_fingerprint=model_fingerprint,
    )


def test_a_worker_of_another_model_is_refused_by_name() -> None:
    hello = router_hello(Config(), RouterOptions("router", smollm2_path()))
    own = read_spec(smollm2_path()).fingerprint
    assert difference(hello, hello_of_worker(own)) is None
    refusal = difference(hello, hello_of_worker("f" * 32))
    assert refusal is not None
    assert refusal.startswith("model_fingerprint: the opener has ")


def test_a_text_side_without_weights_takes_any_worker(tmp_path: Path) -> None:
    for file in smollm2_path().glob("*.json"):
        shutil.copy(file, tmp_path)
    hello = router_hello(Config(), RouterOptions("router", tmp_path))
    assert difference(hello, hello_of_worker("f" * 32)) is None
