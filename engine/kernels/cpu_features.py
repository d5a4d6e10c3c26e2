"""What this processor can do fast: which type of weights it multiplies best.

Measured with oneDNN on two cores, SmolLM2 shapes, packed weights: with AVX512-BF16, bf16 takes half
the time of f32 at 1 to 512 rows; without it (or AMX) bf16 is emulated and ten times slower.
"""

from __future__ import annotations

from pathlib import Path

import torch

from core.config import WeightsChoice

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


def weights_dtype(
    choice: WeightsChoice, device: torch.device, flags: frozenset[str]
) -> torch.dtype:
    """Resolve `engine.weights`; "auto" is the faster type here."""
    if choice == "auto":
        fast_bf16 = device.type != "cpu" or bool(flags & _BF16_UNITS)
        return torch.bfloat16 if fast_bf16 else torch.float32
    return torch.bfloat16 if choice == "bf16" else torch.float32


def instruction_set(flags: frozenset[str]) -> str:
    """Name what can change rounding, for the numerics id."""
    named = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return "+".join(named) or "generic"
