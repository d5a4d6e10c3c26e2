"""The shared vocabulary: ids, requests, KV layout, block hashes, messages, config, errors, clock.

Knows only the standard library and msgspec. Everything here is a value or a pure function,
except `core.environment` (the only reader of the environment), `core.clock` (the only reader
of the clock) and `core.log`. It may not know about models, networks or processes.
"""
