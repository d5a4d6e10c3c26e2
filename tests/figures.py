"""Figures that tests measured, shown at the end of the run whether they passed or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Figures = Callable[..., None]
"""`figures("largest difference 1e-4", ...)`: show these lines."""

LINES = pytest.StashKey[list[str]]()
"""Where a session keeps them."""
