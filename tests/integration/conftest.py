"""Fixtures of integration tests."""

from __future__ import annotations

from tests.hub_downloads import hub

__all__ = ["hub"]
