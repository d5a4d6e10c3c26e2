"""One model replica: batching, KV memory, scheduling, models and executors.

Knows token ids, not text, and not the network: it never imports `kv_transfer` (the pools join the
two) and never a socket. `memory` and `scheduling` are pure and shared with the simulator.
"""
