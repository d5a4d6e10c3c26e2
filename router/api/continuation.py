"""`continue_final_message`: the prompt ends within the last message, which the answer goes on with.

A template closes every message, so the last one is marked where it ends before it is rendered, and
what the template puts after the mark is cut off (transformers' way).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import RequestError

_MARK = "<<the answer goes on here>> "


def marked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, the last one marked at its end; each has a string `content`."""
    last = dict(messages[-1])
    last["content"] += _MARK
    return [*map(dict, messages[:-1]), last]


def cut_at_mark(rendered: str) -> str:
    """Return the prompt up to the mark. Where the template strips contents, so does this.

    Raises:
        RequestError: 400; the template does not show the last message.
    """
    at = rendered.rfind(_MARK.rstrip())
    if at < 0:
        msg = (
            "continue_final_message = true: the model's chat template does not show the last "
            "message; leave it out"
        )
        raise RequestError(msg, param="continue_final_message", code="chat_template_error")
    is_kept = rendered.startswith(_MARK, at)
    return rendered[:at] if is_kept else rendered[:at].rstrip()
