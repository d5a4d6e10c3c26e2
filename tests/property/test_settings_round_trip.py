"""deploy.settings: what the launcher writes for its children is what they read."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from core.config import (
    ApiConfig,
    Config,
    HttpConfig,
    KvTransferConfig,
    ModelConfig,
    RouterConfig,
    load,
)
from deploy.settings import to_toml

# TOML texts hold any Unicode scalar value.
texts: st.SearchStrategy[Any] = st.text(st.characters(codec="utf-8"))
seconds = st.floats(min_value=1e-9, allow_infinity=False)
factors = st.floats(min_value=1e-9, allow_infinity=True)


@given(texts, st.lists(texts).map(tuple), st.integers(0, 65535), seconds, factors, st.booleans())
def test_file_of_a_configuration_gives_it_back(
    path: str,
    keys: tuple[str, ...],
    port: int,
    timeout_s: float,
    near_best: float,
    verify: bool,
) -> None:
    config = Config(
        model=ModelConfig(path=path),
        api=ApiConfig(keys=keys),
        http=HttpConfig(port=port, allow_origins=keys),
        kv_transfer=KvTransferConfig(verify=verify),
        router=RouterConfig(request_timeout_s=timeout_s, near_best=near_best),
    )
    assert load(tomllib.loads(to_toml(config))) == config
