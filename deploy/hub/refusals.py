"""What went wrong with a hub, in one line that says what to do."""

from __future__ import annotations

import errno
from pathlib import Path

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from deploy.hub.model_id import ModelId

HUB_ERRORS = (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, KeyError)
"""All that talking to a hub, or to something else at its address, raises."""

_STATUS_ADVICE = {
    401: "does not know the token; set HF_TOKEN to a valid one, or to none for public models",
    403: "lets this token not read it; set HF_TOKEN to one that may",
    429: "had too many requests; try again later, or set HF_TOKEN",
}


def refusal(error: Exception, model: ModelId, cache: Path) -> str:
    """Return the line.

    Args:
        error: one of `HUB_ERRORS`.
        cache: where downloads go.
    """
    return f"model {str(model)!r}: {_reason(error, model, cache)}"


def not_cached(model: ModelId, cache: Path) -> str:
    """Return the line for a model that must come from the cache and is not whole there."""
    return (
        f"model {str(model)!r}: is no path here, nor whole in {cache}, and HF_HUB_OFFLINE is set; "
        "unset that once, or give a path"
    )


def _reason(error: Exception, model: ModelId, cache: Path) -> str:
    match error:
        case GatedRepoError():
            page = f"{constants.ENDPOINT}/{model.repository}"
            if get_token() is None:
                return f"is gated; accept its terms at {page} and set HF_TOKEN to your token"
            return f"is gated, and HF_TOKEN's account has no access; ask for it at {page}"
        case RevisionNotFoundError():
            return f"{model.repository} has no revision {model.revision!r} at {constants.ENDPOINT}"
        case RepositoryNotFoundError():
            return (
                f"is no path here, and {constants.ENDPOINT} has no such model, or a private one: "
                "check the name, or set HF_TOKEN"
            )
        case HfHubHTTPError():
            status = error.response.status_code
            advice = _STATUS_ADVICE.get(status, f"answered {status}; try again later")
            return f"{constants.ENDPOINT} {advice}"
        case httpx2.HTTPError() | httpx2.InvalidURL():
            reason = str(error) or type(error).__name__
            return (
                f"is no path here, and {constants.ENDPOINT} cannot be reached ({reason}); check "
                "the network, HTTPS_PROXY and HF_ENDPOINT, and start again: what came is kept"
            )
        case OSError(errno=errno.ENOSPC):
            return f"no space is left for it in {cache}; make room, or set HF_HOME"
        case OSError():
            return f"cannot be kept in {cache} ({error.strerror or error}); set HF_HOME"
        case _:
            return f"{constants.ENDPOINT} does not answer as a hub does; check HF_ENDPOINT"
