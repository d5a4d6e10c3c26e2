"""`continue_final_message`: the prompt ends where the last message does."""

from __future__ import annotations

import pytest

from core.errors import RequestError
from router.api.continuation import cut_at_mark, marked
from router.text.chat_template import ChatTemplate

MESSAGES = [
    {"role": "user", "content": "Count."},
    {"role": "assistant", "content": "One, two, "},
]
FORM = "{% for m in messages %}<{{ m.role }}>{{ m.content%s }}<end>\n{% endfor %}"


def rendered(form: str) -> str:
    template = ChatTemplate(form, {})
    return template.render(marked(MESSAGES), add_generation_prompt=False)


def test_what_follows_the_last_content_is_cut_off() -> None:
    assert cut_at_mark(rendered(FORM.replace("%s", ""))) == (
        "<user>Count.<end>\n<assistant>One, two, "
    )
    assert MESSAGES[-1]["content"] == "One, two, "


def test_a_template_that_strips_contents_strips_the_open_one() -> None:
    assert cut_at_mark(rendered(FORM.replace("%s", " | trim"))) == (
        "<user>Count.<end>\n<assistant>One, two,"
    )


def test_a_template_that_hides_the_last_message_is_refused() -> None:
    with pytest.raises(RequestError, match="does not show the last message") as caught:
        cut_at_mark("<user>Count.<end>")
    assert caught.value.param == "continue_final_message"
