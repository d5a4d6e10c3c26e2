"""Fixtures of fault tests."""

from __future__ import annotations

from tests.cluster import not_measured, up

__all__ = ["not_measured", "up"]
