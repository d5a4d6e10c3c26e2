"""`dovetail chat`: a conversation in the terminal, or one answer to what a pipe brings."""

from __future__ import annotations

import readline
import signal
from typing import Any, TextIO

import msgspec

from core.errors import DovetailError, UsageError
from deploy.api_client import START_ADVICE, ApiAddress, ApiClient
from deploy.terminal import complain, lead_stdout_nowhere, say, show

_PROMPT = "you> "
_FORGET = "/new"

# Control characters that a model writes must not steer the terminal.
_VISIBLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class ChatOptions(msgspec.Struct, frozen=True):
    """What the user asks for.

    Attributes:
        model: empty: the one that the cluster serves.
        system: a system message; empty: none, which lets the model's template put its own.
        max_tokens, temperature: None: the API's defaults.
    """

    api: ApiAddress
    model: str = ""
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, client: ApiClient, options: ChatOptions) -> None:
        self._client = client
        self._options = options
        self._messages: list[dict[str, str]] = []
        self.model = options.model or client.model()
        self.forget()

    def forget(self) -> None:
        """Start over, with the system message alone."""
        system = self._options.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str) -> None:
        """Print the answer to `text` as it comes.

        What was shown stays in the conversation, also when Ctrl-C stopped it; a message that got
        no answer does not.

        Raises:
            KeyboardInterrupt: the user stopped it; the request is aborted.
            BrokenPipeError: nobody reads any more (`| head`); the request is aborted.
            DovetailError: the API refused, or is gone.
        """
        self._messages.append({"role": "user", "content": text})
        shown: list[str] = []
        stream = self._client.chat(self._body())
        try:
            for chunk in stream:
                if chunk.text:
                    shown.append(chunk.text)
                    show(chunk.text.translate(_VISIBLE))
        finally:
            if shown:
                self._messages.append({"role": "assistant", "content": "".join(shown)})
                say()
            else:
                self._messages.pop()

    def _body(self) -> dict[str, Any]:
        chosen = {
            "max_tokens": self._options.max_tokens,
            "temperature": self._options.temperature,
        }
        given = {name: value for name, value in chosen.items() if value is not None}
        return {"model": self.model, "messages": self._messages, **given}


def run_chat(options: ChatOptions, *, stdin: TextIO) -> int:
    """Talk until the input ends, or nobody reads; return the exit code.

    Raises:
        UsageError: nothing to answer.
        DovetailError: no cluster answers, or it refused the only message of a pipe.
    """
    client = ApiClient(options.api, advice=START_ADVICE)
    conversation = Conversation(client, options)
    try:
        if stdin.isatty():
            # A shell's background job is started with SIGINT ignored; at a terminal it must work.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _talk(conversation, client.url)
        else:
            conversation.answer(_read_all(stdin))
    except BrokenPipeError:  # of stdout: the client's own are `Unreachable`
        lead_stdout_nowhere()
    return 0


def _talk(conversation: Conversation, url: str) -> None:
    readline.set_auto_history(True)  # editing and history at the prompt
    say(
        f"{conversation.model} at {url}: Ctrl-C stops an answer, {_FORGET} starts over, Ctrl-D ends"
    )
    while (text := _ask()) is not None:
        if text == _FORGET:
            conversation.forget()
        elif text:
            _answer_once(conversation, text)


def _answer_once(conversation: Conversation, text: str) -> None:
    try:
        conversation.answer(text)
    except KeyboardInterrupt:
        say("[stopped]")
    except DovetailError as error:
        complain(str(error))


def _ask() -> str | None:
    """Return a line of the user's, empty after Ctrl-C, None at the end."""
    try:
        return input(_PROMPT).strip()
    except KeyboardInterrupt:
        say()
        return ""
    except EOFError:
        say()
        return None


def _read_all(stdin: TextIO) -> str:
    try:
        text = stdin.read().strip()
    except UnicodeDecodeError:
        msg = "chat: stdin is not a text in UTF-8"
        raise UsageError(msg) from None
    if not text:
        msg = "chat: stdin is empty; pipe a message in, or run it in a terminal"
        raise UsageError(msg)
    return text
