"""From a TOML file, `--set` and flags to one `Config`, and back to a file for the children."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from core.config import Config, EngineConfig, load
from core.errors import ConfigError


def load_config(
    file: Path | None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> Config:
    """Build the configuration; a later source wins: defaults, file, `--set`, flags.

    Args:
        file: a TOML file, or None.
        assignments: `section.key=value` texts of `--set`.
        flags: values of other flags by the `section.key` that they set.
        defaults: a command's own defaults by `section.key`, where they differ from the schema's.

    Raises:
        ConfigError: the file cannot be read, names or values are wrong, or there is no pool for
            the device; one line.
    """
    document = _read(file) if file is not None else {}
    overrides = {
        name: value for name, value in (defaults or {}).items() if not _has(document, name)
    }
    overrides.update(_assignment(text) for text in assignments)
    overrides.update(flags or {})
    config = load(document, overrides)
    _check_device(config.engine)
    return config


def to_toml(config: Config) -> str:
    """Return a file from which `load_config` makes the same configuration."""
    lines: list[str] = []
    sections: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    for section, table in sections.items():
        lines += [f"[{section}]", *(f"{key} = {_value(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def _check_device(engine: EngineConfig) -> None:
    if engine.executor != "mock" and engine.device != "cpu":
        msg = (
            f"engine.device = {engine.device!r}: must be 'cpu'; KV blocks live in host memory, "
            "and a pool in a device's memory does not exist yet"
        )
        raise ConfigError(msg)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"--config {file}: {error.strerror}"
    except UnicodeDecodeError:
        msg = f"--config {file}: is not a text file in UTF-8"
    except tomllib.TOMLDecodeError as error:
        msg = f"--config {file}: is not valid TOML: {error}"
    raise ConfigError(msg)


def _has(document: Mapping[str, Any], dotted: str) -> bool:
    section, _, key = dotted.partition(".")
    table = document.get(section, {})
    # A section that is no table is refused by `load`, which says so better than a default would.
    return not isinstance(table, dict) or key in table


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        msg = f"--set {text!r}: must be section.key=value, such as engine.chunk_tokens=256"
        raise ConfigError(msg)
    return name.strip(), value.strip()


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item) for item in value)}]"  # pyright: ignore[reportUnknownVariableType] - TOML is untyped
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped, and for
        # characters beyond the first plane, which JSON would escape as a surrogate pair.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
