"""core.errors: a refusal carries what api.md's error object needs."""

from __future__ import annotations

import pytest

from core.errors import ConfigError, DovetailError, ModelError, RequestError, UsageError


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "service_unavailable"),
    ],
)
def test_error_type_follows_the_status(status: int, kind: str) -> None:
    assert RequestError("no", status=status).type == kind


def test_refusal_keeps_its_fields() -> None:
    error = RequestError("busy", status=429, param="n", code="overloaded", retry_after_s=2.0)
    assert (error.message, error.param, error.code, error.retry_after_s) == (
        "busy",
        "n",
        "overloaded",
        2.0,
    )
    assert str(error) == "busy"


def test_slips_of_the_user_are_usage_errors() -> None:
    assert issubclass(ConfigError, UsageError)
    assert issubclass(ModelError, UsageError)
    assert issubclass(UsageError, DovetailError)
