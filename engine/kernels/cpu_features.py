"""What this processor can do fast in torch: which type of weights it multiplies best there.

Measured with oneDNN on two cores, SmolLM2 shapes, packed weights: with AVX512-BF16, bf16 takes half
the time of f32 at 1 to 512 rows; without it (or AMX) bf16 is emulated and ten times slower.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from core.config import WeightsChoice
from core.errors import ConfigError

_CPUINFO = Path("/proc/cpuinfo")
_BF16_UNITS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last is Arm's


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Return the first processor's feature flags as Linux names them; empty where unknown."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def torch_weights(
    choice: WeightsChoice, device: str, flags: frozenset[str]
) -> Literal["f32", "bf16"]:
    """Resolve `engine.weights` for the torch executor; "auto" is the faster type here.

    Args:
        choice: the setting.
        device: torch's name of it.
        flags: see `cpu_flags`.

    Raises:
        ConfigError: a type that only the native executor computes with.
    """
    if choice in ("int8", "native"):
        msg = (
            f"engine.weights = {choice!r}: needs the native executor; the torch executor has "
            "'auto', 'f32' and 'bf16'"
        )
        raise ConfigError(msg)
    if choice == "auto":
        fast_bf16 = not device.startswith("cpu") or bool(flags & _BF16_UNITS)
        return "bf16" if fast_bf16 else "f32"
    return "bf16" if choice == "bf16" else "f32"


def instruction_set(flags: frozenset[str]) -> str:
    """Name what can change rounding, for the numerics id."""
    named = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return "+".join(named) or "generic"
