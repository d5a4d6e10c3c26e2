"""deploy.cli.platform_check: where Dovetail runs, and what it says elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from deploy.cli.platform_check import OWN_PACKAGES, missing_package, unsupported


@pytest.mark.parametrize("version", [(3, 11), (3, 12), (3, 13)])
def test_supported(version: tuple[int, int]) -> None:
    assert unsupported(version, "linux", "x86_64") is None


@pytest.mark.parametrize(
    ("version", "system", "machine", "said"),
    [
        ((3, 10), "linux", "x86_64", "this one is 3.10"),
        ((3, 14), "linux", "x86_64", "this one is 3.14"),
        ((3, 11), "darwin", "arm64", "Linux x86-64 only"),
        ((3, 11), "linux", "aarch64", "this is linux aarch64"),
        ((3, 11), "win32", "AMD64", "this is win32 AMD64"),
    ],
)
def test_unsupported_says_what_is_needed_and_what_is_here(
    version: tuple[int, int], system: str, machine: str, said: str
) -> None:
    assert said in (unsupported(version, system, machine) or "")


def test_own_packages_are_those_of_the_checkout() -> None:
    spec = importlib.util.find_spec("deploy")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent.parent
    found = {path.parent.name for path in root.glob("*/__init__.py")}
    assert found - {"bench"} == set(OWN_PACKAGES)  # benchmarks are not installed


def test_only_third_party_modules_can_be_missing() -> None:
    assert missing_package("core.ids", "pip") is None
    advice = missing_package("torch.nn", "/v/bin/python -m pip") or ""
    assert "'torch'" in advice
    assert "`/v/bin/python -m pip install -c" in advice
