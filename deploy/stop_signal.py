"""SIGTERM and SIGINT as one event of the asyncio loop."""

from __future__ import annotations

import asyncio
import signal


def stop_requested() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; call on the running loop, once."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event
