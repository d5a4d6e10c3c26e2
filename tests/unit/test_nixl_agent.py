"""What NIXL's absence looks like to a user."""

from __future__ import annotations

import pytest

from core.errors import FabricError
from kv_transfer.nixl.agent import NixlAgent


def test_a_missing_wheel_is_a_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_transfer.nixl.agent._BINDINGS", "nixl_cu12.not_there")
    with pytest.raises(FabricError, match=r"cannot be imported \(.*pip install nixl==1\.5\.1\)"):
        NixlAgent("here@1", listen="192.0.2.1")


def test_a_closed_agent_says_so() -> None:
    agent = NixlAgent("closed@1", listen="127.0.0.1")
    agent.close()
    agent.close()
    with pytest.raises(FabricError, match="closed"):
        agent.metadata()
