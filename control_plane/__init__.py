"""The control plane: etcd (membership, cache ledger, preemptions), the streams between processes
(`rpc`), and what a worker is there for (`roles`).

Knows workers and messages; decides nothing about requests and never touches a tensor. The ledger
is a hint for routing: no correctness decision reads it. An etcd outage never touches serving.
"""
