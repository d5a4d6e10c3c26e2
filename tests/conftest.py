"""What every test shares."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Coroutine tests run on asyncio, as the product does."""
    return "asyncio"
