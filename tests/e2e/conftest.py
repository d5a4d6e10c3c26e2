"""Fixtures of end-to-end tests."""

from __future__ import annotations

from tests.cluster import up

__all__ = ["up"]
