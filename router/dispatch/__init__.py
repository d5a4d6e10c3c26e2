"""From a validated request to its tokens: streams to the workers, one state machine a request.

Knows token ids and workers, not text and not HTTP. `request_state` and `timers` decide and are
pure; `dispatcher` wires them to the streams.
"""
