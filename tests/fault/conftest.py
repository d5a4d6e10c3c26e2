"""Fixtures of fault tests."""

from __future__ import annotations

from tests.cluster import up

__all__ = ["up"]
