"""README.md: its configuration table is the schema, with the schema's defaults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from core.config import Config

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
