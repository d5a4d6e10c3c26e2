"""The decode worker: reservation, asking for prefill, receiving, joining, local prefill, failures.

It joins an engine and the fabric by the rules of `kv_transfer.handoff.decode_side` and owns every
request that routers send it, from start to last token. It knows token ids, not text.

    worker          what the process runs: listener for routers, one task
    requests        all requests: starts, aborts, tokens, deadlines
    receiving       the handoffs of those whose prompt is computed elsewhere, quarantine and fence
    prefill_peers   streams to prefill workers, opened on demand
    prefill_slips   what no prefill worker can mean
    verification    checksums of what landed (`kv_transfer.verify`)
"""
