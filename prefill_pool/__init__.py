"""The prefill worker: admission, the chunk pipeline, and pushing finished blocks while computing.

It joins an engine (Mode.PREFILL) and the fabric by the rules of `kv_transfer.handoff.prefill_side`.
`attempts` interprets its effects; `pusher` posts the writes; `router_streams` tells routers the
load, and `worker` is what the process runs.
It knows token ids and blocks, not text, and it never decides which worker serves a request.
"""
