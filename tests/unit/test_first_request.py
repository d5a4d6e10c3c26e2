"""first_request and welcome: what a start shows of the path, and what to do next."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from deploy.launcher.first_request import FirstAnswer, describe
from deploy.launcher.welcome import READY, welcome


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (
            {
                "prefill_worker": "prefill-0",
                "decode_worker": "decode-0",
                "blocks_transferred": 1,
                "bytes_transferred": 368_640,
            },
            "prefill-0 -> 1 KV block (0.37 MB) -> decode-0; first token after 250 ms",
        ),
        (
            {"prefill_worker": "p", "decode_worker": "d", "blocks_transferred": 0},
            "p -> 0 KV blocks -> d; first token after 250 ms",
        ),
        (
            {"decode_worker": "colocated-0", "decision": "colocated"},
            "colocated-0 alone (colocated); first token after 250 ms",
        ),
        (None, "not shown (router.debug_headers is off); first token after 250 ms"),
    ],
)
def test_path_in_words(path: dict[str, Any] | None, shown: str) -> None:
    lines = describe(FirstAnswer("Paris,\nof course.", path, 0.25))
    assert lines[1:] == ["answered    Paris, of course.", f"path        {shown}"]


def test_curl_example_can_be_pasted() -> None:
    lines = welcome(["http://127.0.0.1:1"], 'it\'s "m"', has_keys=False, seconds=7.94)
    assert lines[0].startswith(f"{READY}http://127.0.0.1:1/v1  serves it's")
    words = shlex.split(f"{lines[2].removesuffix(chr(92))} {lines[3]}")
    assert words[:2] == ["curl", "http://127.0.0.1:1/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == 'it\'s "m"'
    assert "authorization" not in lines[2]


def test_other_routers_are_named_before_the_line_that_scripts_wait_for() -> None:
    lines = welcome(["http://h:1", "http://h:2"], "m", has_keys=False, seconds=1.0)
    assert lines[0] == "also at     http://h:2/v1"
    assert lines[1].startswith(f"{READY}http://h:1/v1  serves m")


def test_key_is_asked_for_and_not_shown() -> None:
    lines = welcome(["http://h:1"], "m", has_keys=True, seconds=1.0)
    assert "authorization: Bearer YOUR_KEY" in lines[2]
    assert all(line.endswith("--api-key YOUR_KEY") for line in lines[4:6])
