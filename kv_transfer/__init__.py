"""The KV-transfer fabric: registered memory, one-sided reads and writes, and the handoff.

Knows bytes, blocks and peers; knows no model, no request's text, no etcd, and never imports
`engine` (the pools join the two). `handoff` is pure: sans-IO state machines for both sides.
"""
