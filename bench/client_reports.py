"""What load clients measured: read from their own JSON, written as one table.

Formats: guidellm 0.8.1's `--output kind=json`, and aiperf 0.13.0's `profile_export_aiperf.json`
(schema 1.4). Only what the table shows is read; a field that is missing there is an error, so that
a client's new format is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec


class Load(msgspec.Struct, frozen=True):
    """What one run of a client asks for.

    Attributes:
        client: its name.
        endpoint: path of the API.
        concurrency: requests at a time.
    """

    client: str
    endpoint: str
    concurrency: int


class Measured(msgspec.Struct, frozen=True):
    """What a client says of one run.

    Attributes:
        version: of the client.
        date: of the run, ISO.
        num_requests: answered or not. guidellm can lose the record of its last request: it stops
            reading once it knows that all have ended, whether or not that record was read.
        num_errors: of these; requests that were cut off count.
        ttft_p50_ms: median over the requests.
        itl_p50_ms: median of the time between tokens, as the client defines it: guidellm over the
            tokens, aiperf over the requests' means.
        output_tokens_per_s: of all requests together.
    """

    version: str
    date: str
    num_requests: int
    num_errors: int
    ttft_p50_ms: float
    itl_p50_ms: float
    output_tokens_per_s: float


class Row(msgspec.Struct, frozen=True):
    """A line of the table.

    Attributes:
        num_answered: by the router's own count, a client's probes included.
        machine: in words.
    """

    load: Load
    measured: Measured
    num_answered: int
    machine: str


class _Spread(msgspec.Struct, frozen=True):
    median: float
    mean: float


class _BySuccess(msgspec.Struct, frozen=True):
    successful: _Spread


class _RequestTotals(msgspec.Struct, frozen=True):
    total: int
    successful: int


class _GuidellmMetrics(msgspec.Struct, frozen=True):
    request_totals: _RequestTotals
    time_to_first_token_ms: _BySuccess
    inter_token_latency_ms: _BySuccess
    output_tokens_per_second: _BySuccess


class _GuidellmBenchmark(msgspec.Struct, frozen=True):
    start_time: float
    metrics: _GuidellmMetrics


class _GuidellmMetadata(msgspec.Struct, frozen=True):
    guidellm_version: str


class _GuidellmReport(msgspec.Struct, frozen=True):
    metadata: _GuidellmMetadata
    benchmarks: tuple[_GuidellmBenchmark]


def read_guidellm(report: bytes) -> Measured:
    """Read a report of one benchmark.

    Raises:
        msgspec.ValidationError: another format; names the field.
    """
    read = msgspec.json.decode(report, type=_GuidellmReport)
    (benchmark,) = read.benchmarks
    metrics = benchmark.metrics
    totals = metrics.request_totals
    return Measured(
        version=read.metadata.guidellm_version,
        date=datetime.fromtimestamp(benchmark.start_time, UTC).date().isoformat(),
        num_requests=totals.total,
        num_errors=totals.total - totals.successful,
        ttft_p50_ms=metrics.time_to_first_token_ms.successful.median,
        itl_p50_ms=metrics.inter_token_latency_ms.successful.median,
        output_tokens_per_s=metrics.output_tokens_per_second.successful.mean,
    )


class _Average(msgspec.Struct, frozen=True):
    avg: float


class _Percentiles(msgspec.Struct, frozen=True):
    p50: float


class _AiperfReport(msgspec.Struct, frozen=True):
    aiperf_version: str
    start_time: str
    completed_request_count: _Average
    request_count: _Average
    time_to_first_token: _Percentiles
    inter_token_latency: _Percentiles
    output_token_throughput: _Average


def read_aiperf(report: bytes) -> Measured:
    """Read a report; aiperf writes none where no request succeeded.

    Raises:
        msgspec.ValidationError: another format; names the field.
    """
    read = msgspec.json.decode(report, type=_AiperfReport)
    num_requests = round(read.completed_request_count.avg)
    return Measured(
        version=read.aiperf_version,
        date=datetime.fromisoformat(read.start_time).date().isoformat(),
        num_requests=num_requests,
        num_errors=num_requests - round(read.request_count.avg),
        ttft_p50_ms=read.time_to_first_token.p50,
        itl_p50_ms=read.inter_token_latency.p50,
        output_tokens_per_s=read.output_token_throughput.avg,
    )


_TITLES = (
    "client",
    "version",
    "endpoint",
    "concurrency",
    "answered",
    "requests",
    "errors",
    "TTFT p50 ms",
    "ITL p50 ms",
    "output tokens/s",
    "date",
    "machine",
)
_PAGE = """\
# Load of independent clients

`make clients` wrote this page from the clients' own JSON reports.

{text}

{table}
"""


def page(text: str, rows: Sequence[Row]) -> str:
    """Return the page in Markdown.

    Args:
        text: what was run, in sentences.
    """
    lines = [_TITLES, ("-",) * len(_TITLES), *(_cells(row) for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return _PAGE.format(text=text, table=table)


def _cells(row: Row) -> tuple[str, ...]:
    load, measured = row.load, row.measured
    return (
        load.client,
        measured.version,
        f"`{load.endpoint}`",
        str(load.concurrency),
        str(row.num_answered),
        str(measured.num_requests),
        str(measured.num_errors),
        f"{measured.ttft_p50_ms:.0f}",
        f"{measured.itl_p50_ms:.1f}",
        f"{measured.output_tokens_per_s:.1f}",
        measured.date,
        row.machine,
    )
