"""Chat templates against transformers' renderer."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from core.errors import ModelError, RequestError
from router.text.chat_template import ChatTemplate
from router.text.text_model import TextModel
from router.text.tokenizer_source import TokenizerSource
from tests.router_server import smollm2_text

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "héllo  \n"},
    {"role": "assistant", "content": "hi {{ 1 }}"},
    {"role": "user", "content": ""},
]

TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}\n{% endfor %}",
    """{%- for m in messages %}
    {% if m.role == 'user' %}
  U:{{ m.content }}
    {% endif %}
{% endfor %}""",
    """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}""",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    """{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}
{{ m.content }}{% endfor %}""",
    """{% set ns = namespace(n=0) %}
{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}""",
    "{{ tools is none }}{{ documents is none }}{{ missing }}{{ enable_thinking | default(true) }}",
    "{% if add_generation_prompt %}>>>{% endif %}{{ dict(a=1) }}{{ range(3) | list }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False, "bos_token": "<B>"}])
def test_renders_as_transformers(source: str, prompted: bool, variables: dict[str, Any]) -> None:
    special = {"bos_token": "<s>"}
    kwargs: dict[str, Any] = {**special, **variables}
    expected, _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=prompted, **kwargs
    )
    template = ChatTemplate(source, special)
    rendered = template.render(MESSAGES, add_generation_prompt=prompted, variables=variables)
    assert rendered == expected[0]


@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:], MESSAGES[1:2]])
def test_renders_the_model_s_own_template(messages: list[dict[str, Any]]) -> None:
    rendered = smollm2_text().render_chat(messages)
    assert rendered.startswith("<|im_start|>system\n")
    assert rendered.endswith("<|im_start|>assistant\n")
    for message in messages:
        assert f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" in rendered


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[9].content.x }}",
    ],
)
def test_what_a_template_refuses_is_a_400(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.status == 400
    assert caught.value.param == "messages"


def test_the_template_s_own_words_reach_the_client() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(MESSAGES)


def test_the_clock_is_the_template_s() -> None:
    year = ChatTemplate("{{ strftime_now('%Y') }}", {}).render(MESSAGES)
    assert year.isdigit()
    assert len(year) == 4


def test_a_broken_template_is_the_model_s_fault() -> None:
    with pytest.raises(ModelError, match="chat template, line 2"):
        ChatTemplate("a\n{% for %}", {})


def test_a_model_without_template_refuses_chat() -> None:
    tokenizer = smollm2_text()._tokenizer
    source = TokenizerSource("base", tokenizer, (2,), {}, None, 0)
    with pytest.raises(RequestError, match="has no chat template"):
        TextModel(source).render_chat(MESSAGES)
