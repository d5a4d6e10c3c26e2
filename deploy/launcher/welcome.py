"""The ready line, and what to do next, with paths that can be pasted anywhere."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

READY = "ready       "
"""How the line begins that says that the cluster serves; scripts wait for it."""


def welcome(urls: Sequence[str], model: str, *, has_keys: bool, seconds: float) -> list[str]:
    """Return the last lines of a start.

    Args:
        urls: of the routers, at least one.
        has_keys: the API wants a key, which is not printed.
        seconds: since the launcher began.
    """
    program = shlex.quote(str(Path(sys.executable).with_name("dovetail")))
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    header = " -H 'authorization: Bearer YOUR_KEY'" if has_keys else ""
    key = " --api-key YOUR_KEY" if has_keys else ""
    url, *others = urls
    return [
        *(f"{'also at':<12}{other}/v1" for other in others),
        f"{READY}{url}/v1  serves {model}, up in {seconds:.1f} s; Ctrl-C stops",
        "",
        f"  curl {url}/v1/chat/completions{header} -H 'content-type: application/json' \\",
        f"    -d {shlex.quote(body)}",
        f"  {program} chat --url {url}{key}",
        f"  {program} status --url {url}{key}",
        "",
    ]
