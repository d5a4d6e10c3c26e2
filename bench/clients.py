"""`python -m bench.clients`: guidellm and aiperf load a cluster; docs/clients.md has what they say.

They are other people's programs with a client of their own each: what they cannot read in our
answers shows here. They live in an environment of their own (`make clients` makes it), and share
the processors with the cluster, so their figures say what works more than how fast.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.client_reports import Load, Measured, Row, page, read_aiperf, read_guidellm
from bench.cluster import ClusterFailed, cluster
from bench.timed_client import TimedClient
from core.environment import child_environment
from deploy.model_path import resolve_model
from deploy.terminal import complain
from router.text.gguf_tokenizer import load_gguf

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LOADS = tuple(
    Load(client, endpoint, concurrency)
    for client in ("guidellm", "aiperf")
    for endpoint, concurrency in ((CHAT, 1), (CHAT, 4), (TEXT, 8))
)
RUN_S = 900.0
"""The longest that one run may take."""
_ROOT = Path(__file__).parent.parent
_CLUSTER = ("--prefill", "1", "--decode", "1")


class Target(NamedTuple):
    """What a client is pointed at.

    Attributes:
        url: of the router, without `/v1`.
        tokenizer: a directory in Hugging Face's form.
    """

    url: str
    model: str
    tokenizer: Path
    num_requests: int


class ClientFailed(Exception):  # noqa: N818 - says what happened
    """A client did not run to its end, or its report cannot be read; the message says which."""


class Client(NamedTuple):
    """How a client is run and read.

    Attributes:
        arguments: its command line after the program's name, for (load, target, seed, directory
            that its files go to).
        report: the file in that directory.
    """

    arguments: Callable[[Load, Target, int, Path], Sequence[str]]
    report: str
    read: Callable[[bytes], Measured]


def guidellm_arguments(load: Load, target: Target, seed: int, directory: Path) -> list[str]:
    """Return guidellm's command line; it asks for usage and for `ignore_eos` by itself."""
    backend = f"kind=openai_http,target={target.url},model={target.model}"
    tokens = "prompt_tokens=96,prompt_tokens_stdev=16,prompt_tokens_min=64,prompt_tokens_max=128"
    outputs = "output_tokens=48,output_tokens_stdev=8,output_tokens_min=32,output_tokens_max=64"
    return [
        "run",
        *("--backend", f"{backend},request_format={load.endpoint}"),
        *("--profile", f"kind=concurrent,streams={load.concurrency}"),
        *("--constraint", f"kind=max_requests,count={target.num_requests}"),
        *("--tokenizer", f"kind=hf_auto,model={target.tokenizer}"),
        *("--data", f"kind=synthetic_text,{tokens},{outputs}"),
        *("--seed", f"kind=static,value={seed}"),
        *("--output", f"kind=json,path={directory / 'guidellm.json'}"),
        *("--output", "kind=console"),
        "--disable-console-interactive",
    ]


def aiperf_arguments(load: Load, target: Target, seed: int, directory: Path) -> list[str]:
    """Return aiperf's command line.

    Tokens are counted by our usage: aiperf's own count knows no chat template, and of a text it
    encodes anew other tokens may come than were generated. In chats it can ask for the usage of
    each chunk.
    """
    endpoint_type = ("chat", "--per-chunk-usage") if load.endpoint == CHAT else ("completions",)
    return [
        "profile",
        *("--model", target.model, "--url", target.url, "--tokenizer", str(target.tokenizer)),
        *("--streaming", "--endpoint-type", *endpoint_type),
        *("--use-server-token-count", "--extra-inputs", "ignore_eos:true"),
        *("--wait-for-model-timeout", "60", "--wait-for-model-mode", "both"),
        *("--isl", "96", "--isl-stddev", "16", "--osl", "48", "--osl-stddev", "8"),
        *("--concurrency", str(load.concurrency), "--workers-max", "1"),
        *("--request-count", str(target.num_requests)),
        *("--num-dataset-entries", str(target.num_requests), "--random-seed", str(seed)),
        *("--output-artifact-dir", str(directory), "--ui-type", "none", "--no-gpu-telemetry"),
    ]


CLIENTS: Mapping[str, Client] = {
    "guidellm": Client(guidellm_arguments, "guidellm.json", read_guidellm),
    "aiperf": Client(aiperf_arguments, "profile_export_aiperf.json", read_aiperf),
}


def export_tokenizer(gguf: Path, directory: Path) -> None:
    """Write a GGUF file's tokenizer as a directory that `transformers.AutoTokenizer` loads."""
    source = load_gguf(gguf)
    directory.mkdir(parents=True)
    source.tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.max_model_len,
        "chat_template": source.chat_template,
        **source.special_tokens,
    }
    (directory / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))


def measure(load: Load, target: Target, seed: int, programs: Path, directory: Path) -> Measured:
    """Run one client to its end.

    Args:
        seed: of its prompts; another one for each run, or the prefix cache would answer.
        programs: directory of the clients' programs.
        directory: not there yet; gets what the client writes, its output as `output.txt`.

    Raises:
        ClientFailed: it failed, took too long, or its report is none.
    """
    client = CLIENTS[load.client]
    directory.mkdir(parents=True)
    output = directory / "output.txt"
    command = [
        str(programs / load.client),
        *client.arguments(load, target, seed, directory),
    ]
    _run(command, directory, output)
    report = directory / client.report
    try:
        return client.read(report.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{load.client}: {report.name}: {error}"
        raise ClientFailed(msg) from None


def answered(port: int) -> int:
    """Return how many requests the router has answered to their end."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as router:
        router.request("GET", "/metrics")
        text = router.getresponse().read().decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return round(
        sum(
            one.value
            for one in samples
            if one.name == "vllm:request_success_total"
            and one.labels["finished_reason"] in ("stop", "length")
        )
    )


def machine_words() -> str:
    """Return the machine in words, with its load as it is."""
    gpu = "GPU unused" if Path("/proc/driver/nvidia/version").exists() else "no GPU"
    return f"{len(os.sched_getaffinity(0))} cores, {gpu}, load average {os.getloadavg()[0]:.1f}"


def _run(command: Sequence[str], directory: Path, output: Path) -> None:
    # With HF_HUB_OFFLINE set to anything, aiperf takes a tokenizer's directory for a hub's name.
    inherited = child_environment({"TMPDIR": str(directory), "HF_HOME": str(directory / "hub")})
    environment = {name: value for name, value in inherited.items() if name != "HF_HUB_OFFLINE"}
    with (
        output.open("wb") as said,
        subprocess.Popen(  # noqa: S603 - our own command
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            code = process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # its workers with it
    if code != 0:
        how = f"took longer than {RUN_S:g} s" if code is None else f"exit code {code}"
        last = "\n".join(output.read_text(errors="replace").splitlines()[-30:])
        msg = f"{' '.join(command)}: {how}\n{last}"
        raise ClientFailed(msg)


def main() -> int:
    """Run every load, write the page.

    Returns:
        1 if a request failed, by the client's or the router's account; 2 if a client is not
        installed.
    """
    arguments = _arguments()
    missing = [name for name in CLIENTS if not (arguments.programs / name).is_file()]
    if missing:
        complain(f"{arguments.programs / missing[0]}: not there; `make clients` installs it")
        return 2
    with tempfile.TemporaryDirectory(prefix="dovetail-clients-") as temporary:
        try:
            rows = _measure_all(arguments, Path(temporary))
        except (ClientFailed, ClusterFailed) as error:
            sys.stderr.write(f"{error}\n")
            return 1
        except KeyboardInterrupt:
            return 130
    arguments.page.parent.mkdir(exist_ok=True)
    arguments.page.write_text(page(_described(arguments.requests), rows), encoding="utf-8")
    _say(f"written to {arguments.page}")
    return 0 if all(_is_good(row, arguments.requests) for row in rows) else 1


def _measure_all(arguments: argparse.Namespace, temporary: Path) -> list[Row]:
    files = arguments.files or temporary / "runs"
    tokenizer = temporary / "tokenizer"
    export_tokenizer(resolve_model(""), tokenizer)
    rows: list[Row] = []
    with cluster(_CLUSTER) as port:
        with contextlib.closing(TimedClient(port)) as client:
            model = client.model
        target = Target(f"http://127.0.0.1:{port}", model, tokenizer, arguments.requests)
        for seed, load in enumerate(LOADS, start=1):
            name = f"{load.client}{load.endpoint.replace('/', '-')}-{load.concurrency}"
            machine, before = machine_words(), answered(port)
            measured = measure(load, target, seed, arguments.programs, files / name)
            rows.append(Row(load, measured, answered(port) - before, machine))
            _say(f"{name}: {measured}")
    return rows


def _is_good(row: Row, num_requests: int) -> bool:
    return row.num_answered >= num_requests and row.measured.num_errors == 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description=__doc__)
    programs = _ROOT / ".venv-clients" / "bin"
    parser.add_argument("--programs", type=Path, default=programs, help="where the clients are")
    parser.add_argument("--requests", type=int, default=30, help="of each run (default: 30)")
    parser.add_argument("--page", type=Path, default=_ROOT / "docs" / "clients.md")
    parser.add_argument("--files", type=Path, help="keep the clients' output and reports here")
    return parser.parse_args()


def _described(num_requests: int) -> str:
    return f"""\
`dovetail up {" ".join(_CLUSTER)}` with the default model; each line is {num_requests} streamed
requests with prompts of about 96 tokens and outputs of about 48. Clients, router and workers share
the machine; its load average is that before the run, and one per core or more means that other work
slowed this. *answered* is the router's count, probes included; the rest is what the clients say
(guidellm can lose the record of its last request). ITL is what each means by it: guidellm's median
is over the tokens, aiperf's over the requests' means."""


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
