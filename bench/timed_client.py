"""Times one request over one kept connection, as a client sees it: until the first chunk."""

from __future__ import annotations

import http.client
import random
import time
from typing import Any

import msgspec

_TEXT = (
    "river stone market window garden letter engine winter captain silver forest music paper bridge"
    " candle doctor island journey kitchen ladder mountain number orange planet quiet rabbit school"
    " theatre under village water yellow answer border cotton dinner evening flower ground history"
)


class TimedClient:
    """One router, one connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self.model: str = self._get("/v1/models")["data"][0]["id"]

    def fresh_prompt(self, num_tokens: int, seed: int) -> list[int]:
        """Return the ids of so many tokens of text that no cache has seen.

        Args:
            seed: another text for another one.
        """
        words = random.Random(seed).choices(_TEXT.split(), k=num_tokens + 8)  # noqa: S311 - no secret
        body = {"model": self.model, "prompt": f"{seed} {' '.join(words)}"}
        return self._post("/tokenize", body)["tokens"][:num_tokens]

    def ttft(
        self, prompt: list[int], headers: dict[str, str], *, max_tokens: int = 1
    ) -> tuple[float, dict[str, Any]]:
        """Return the seconds until the first token's chunk, and the path that the router told.

        The answer is read to its end, so that the cluster is idle afterwards. A request that ends
        at its first token never joins at the decode worker, so its path has no exposed transfer.
        """
        body = msgspec.json.encode(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        )
        all_headers = {"content-type": "application/json", "x-dovetail-trace": "1", **headers}
        start = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, all_headers)
        response = self._connection.getresponse()
        first_line = response.readline()
        while first_line.startswith((b":", b"\n")):  # comments that keep a silent stream open
            first_line = response.readline()
        seconds = time.perf_counter() - start
        rest = response.read()
        if response.status != 200 or not first_line.startswith(b"data: {"):
            msg = f"/v1/completions: {response.status} {(first_line + rest).decode()}"
            raise RuntimeError(msg)
        return seconds, _path(first_line + rest)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _get(self, path: str) -> Any:
        self._connection.request("GET", path)
        return self._json(path)

    def _post(self, path: str, body: Any) -> Any:
        headers = {"content-type": "application/json"}
        self._connection.request("POST", path, msgspec.json.encode(body), headers)
        return self._json(path)

    def _json(self, path: str) -> Any:
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            msg = f"{path}: {response.status} {body.decode()}"
            raise RuntimeError(msg)
        return msgspec.json.decode(body)


def _path(stream: bytes) -> dict[str, Any]:
    """Return the `dovetail` object of the last chunk that has one."""
    for line in reversed(stream.splitlines()):
        if line.startswith(b"data: {"):
            chunk = msgspec.json.decode(line[6:])
            if "dovetail" in chunk:
                return chunk["dovetail"]
    msg = "no chunk tells the request's path; is router.debug_headers off?"
    raise RuntimeError(msg)
