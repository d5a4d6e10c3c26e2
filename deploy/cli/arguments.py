"""The command line's grammar: commands, flags, their help and examples."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from core.errors import UsageError
from core.worker_record import Role

DEFAULT_URL = "http://127.0.0.1:8000"

_DESCRIPTION = """\
Serve a large language model with prefill and decode on separate workers, over the OpenAI API.
"""

_EXAMPLES = """\
a first session:
  dovetail up                  a cluster on this machine; answers on http://127.0.0.1:8000/v1
  dovetail chat                in another terminal: talk to it
  dovetail status              and look at it
"""

_UP_EXAMPLES = """\
examples:
  dovetail up                                  one prefill and one decode worker, default model
  dovetail up --prefill 2 --decode 1           three workers
  dovetail up --routers 2                      the API at ports 8000 and 8001
  dovetail up --colocated 1                    one worker that does both, for comparison
  dovetail up --model ~/models/llama --port 9000
  dovetail up --model HuggingFaceTB/SmolLM2-360M-Instruct
  dovetail up --model bartowski/SmolLM2-360M-Instruct-GGUF:Q8_0
  dovetail up --set engine.chunk_tokens=256 --log-level info

Ctrl-C (or SIGTERM) stops router, workers and etcd in order, exit code 0; once more kills them, exit
code 130.
"""

_WORKER_EXAMPLES = """\
examples (each process by hand, as on a cluster):
  dovetail worker --role prefill --id prefill-0 --etcd 10.0.0.1:2379
  dovetail worker --role decode --id decode-0 --etcd 10.0.0.1:2379 \\
      --listen 10.0.0.3:7000 --set kv_transfer.listen=10.0.0.3
"""

_ROUTER_EXAMPLES = """\
examples:
  dovetail router --etcd 10.0.0.1:2379
  dovetail router --etcd 10.0.0.1:2379,10.0.0.2:2379 --host 0.0.0.0 --config cluster.toml
"""

_CHAT_EXAMPLES = """\
examples:
  dovetail chat
  dovetail chat --system "Answer in French." --temperature 0
  echo "Name three rivers." | dovetail chat --max-tokens 60
"""


_DRAIN_EXAMPLES = """\
examples:
  dovetail drain decode-1
  dovetail drain prefill-0 --deadline 300

It takes no new requests at once. A decode worker's requests go on at another one where there is
one, else they finish. Then its process ends, exit code 0, and `dovetail up` starts no other.
The last one that serves requests is told to leave with --force only.
"""


_ROLE_EXAMPLES = """\
examples:
  dovetail role decode-1 prefill
  dovetail role prefill-0 both

What it runs finishes or goes on at another worker first. Its cache stays. The last one that
decodes stops doing so with --force only.
"""


class CommandParser(argparse.ArgumentParser):
    """Raises instead of printing a page of usage: a slip is one line."""

    def parse_command(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse a command and its flags; what nobody knows is the command's, not the program's."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            msg = (
                f"unrecognized arguments: {' '.join(unknown)} "
                f"(see `{self.prog} {arguments.command} --help`)"
            )
            raise UsageError(msg)
        return arguments

    def error(self, message: str) -> NoReturn:
        msg = f"{message} (see `{self.prog} --help`)"
        raise UsageError(msg)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return a command line's values; the command's name is in `command`.

    Raises:
        UsageError: a slip, in one line.
    """
    return build_parser().parse_command(argv)


def build_parser() -> CommandParser:
    """Return the parser; the command's name lands in `command`."""
    parser = CommandParser(
        prog="dovetail",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # Set by the launcher on its children: they die with it, and report to it.
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    commands = _Commands(parser)
    _add_up(commands)
    _add_router(commands)
    _add_worker(commands)
    _add_status(commands)
    _add_drain(commands)
    _add_role(commands)
    _add_chat(commands)
    commands.add("version", "print the version")
    return parser


class _Commands:
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._action = parser.add_subparsers(
            title="commands",
            dest="command",
            required=True,
            metavar="COMMAND",
            parser_class=CommandParser,
        )

    def add(self, name: str, summary: str, examples: str = "") -> argparse.ArgumentParser:
        return self._action.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )


def _add_up(commands: _Commands) -> None:
    up = commands.add("up", "start a cluster on this machine, in the foreground", _UP_EXAMPLES)
    workers = up.add_argument_group("workers and routers")
    workers.add_argument(
        "--prefill", type=_count, metavar="N", help="workers that compute prompts (default 1)"
    )
    workers.add_argument(
        "--decode", type=_count, metavar="N", help="workers that generate (default 1)"
    )
    workers.add_argument(
        "--colocated", type=_count, metavar="N", default=0, help="workers that do both"
    )
    workers.add_argument(
        "--routers",
        type=_positive,
        metavar="N",
        default=1,
        help="processes with the API, at --port and the ports after it (default 1)",
    )
    _add_model_flags(up)
    _add_http_flags(up)
    _add_shared_flags(up, etcd="etcd of your own, HOST:PORT[,...] (default: one is started)")
    up.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="one log file a process (default: stderr); --log-level info for more than warnings",
    )


def _add_router(commands: _Commands) -> None:
    router = commands.add("router", "run one router (the HTTP API)", _ROUTER_EXAMPLES)
    router.add_argument("--id", default="router", metavar="NAME", help="its name in logs")
    router.add_argument(
        "--model", metavar="MODEL", help="for tokenizer and chat template; as for `up`"
    )
    router.add_argument("--served-model-name", metavar="NAME", help="the model's name in the API")
    _add_http_flags(router)
    _add_shared_flags(router, etcd="HOST:PORT[,HOST:PORT...]")
    router.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)


def _add_worker(commands: _Commands) -> None:
    worker = commands.add("worker", "run one worker", _WORKER_EXAMPLES)
    worker.add_argument(
        "--role",
        required=True,
        choices=[role.value for role in Role],
        help="what it does; it can change at run time",
    )
    worker.add_argument(
        "--id",
        metavar="NAME",
        help="its own in the cluster, the same over restarts (default: ROLE-HOSTNAME)",
    )
    worker.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where other processes reach it (default: 127.0.0.1, any free port)",
    )
    worker.add_argument(
        "--advertise", metavar="HOST", help="host to tell others (default: that of --listen)"
    )
    worker.add_argument("--cpus", metavar="LIST", help="cores to run on, such as 0,2,4-7")
    _add_model_flags(worker)
    _add_shared_flags(worker, etcd="HOST:PORT[,HOST:PORT...]")
    worker.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)


def _add_api(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", help=f"the router's (default: $OPENAI_BASE_URL, else {DEFAULT_URL})"
    )
    command.add_argument(
        "--api-key", metavar="KEY", help="where the API wants one (default: $OPENAI_API_KEY)"
    )


def _add_status(commands: _Commands) -> None:
    status = commands.add("status", "show workers, roles, blocks by state and queues")
    _add_api(status)
    status.add_argument("--json", action="store_true", help="as the router's /status says it")


def _add_drain(commands: _Commands) -> None:
    drain = commands.add(
        "drain", "have a worker hand over what it runs, and leave", _DRAIN_EXAMPLES
    )
    drain.add_argument("worker", metavar="WORKER", help="its id, as `dovetail status` shows it")
    drain.add_argument(
        "--deadline",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="what still runs then is failed over to other workers (default: 60)",
    )
    _add_force(drain)
    _add_api(drain)


def _add_role(commands: _Commands) -> None:
    role = commands.add("role", "have a worker do other work from now on", _ROLE_EXAMPLES)
    role.add_argument("worker", metavar="WORKER", help="its id, as `dovetail status` shows it")
    role.add_argument("role", choices=[role.value for role in Role], help="what it is to do")
    _add_force(role)
    _add_api(role)


def _add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force", action="store_true", help="even if no request is served without it"
    )


def _add_chat(commands: _Commands) -> None:
    chat = commands.add(
        "chat", "talk to the model, in the terminal or through a pipe", _CHAT_EXAMPLES
    )
    _add_api(chat)
    chat.add_argument("--model", default="", metavar="NAME", help="default: the one served")
    chat.add_argument("--system", default="", metavar="TEXT", help="a system message")
    chat.add_argument(
        "--max-tokens", type=int, default=1024, metavar="N", help="longest answer (1024)"
    )
    chat.add_argument(
        "--temperature", type=float, default=0.2, metavar="T", help="0 is greedy, 1 the API's (0.2)"
    )


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="MODEL",
        help="Hugging Face directory, GGUF file, or ORG/NAME[@REVISION][:GGUF] on a hub, which is "
        "downloaded once; a path of that name wins (default: SmolLM2-135M-Instruct)",
    )
    model.add_argument("--served-model-name", metavar="NAME", help="the model's name in the API")
    model.add_argument(
        "--executor",
        metavar="NAME",
        help="auto (default), native, torch, or mock: timing without a model",
    )


def _add_http_flags(parser: argparse.ArgumentParser) -> None:
    http = parser.add_argument_group("API")
    http.add_argument("--host", metavar="HOST", help="where the API binds (default: 127.0.0.1)")
    http.add_argument("--port", metavar="PORT", help="its port; 0: any free one (default: 8000)")


def _add_shared_flags(parser: argparse.ArgumentParser, *, etcd: str) -> None:
    shared = parser.add_argument_group("configuration (later wins: file, --set, other flags)")
    shared.add_argument("--config", type=Path, metavar="FILE", help="TOML file; README lists it")
    shared.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="one value; may be repeated",
    )
    shared.add_argument("--etcd", metavar="ENDPOINTS", help=etcd)
    shared.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    shared.add_argument("--log-format", metavar="FORMAT", help="text or json")


def _count(text: str) -> int:
    if not text.isdecimal():
        msg = f"{text!r} must be a whole number, 0 or more"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        msg = f"{text!r} must be a whole number, 1 or more"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        msg = f"{text!r} must be a number of seconds, 0 or more"
        raise argparse.ArgumentTypeError(msg)
    return seconds
