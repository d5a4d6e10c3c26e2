"""Clusters for fault tests."""

from __future__ import annotations

from tests.e2e.conftest import up

__all__ = ["up"]
