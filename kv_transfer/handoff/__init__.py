"""The handoff protocol as sans-IO state machines: `(state, event, now) -> (state, effects)`.

    arrivals       which blocks of one attempt have landed, over all ranks, in any order
    decode_side    one request at the worker that receives: attempts, candidates, joining, giving up
    prefill_side   one attempt at the worker that computes and pushes
    tombstones     attempts that a settle ended before their ask came, and those never to settle
    quarantine     blocks that a late write may still reach, and the fence that ends the wait
    agent_renewal  when the writer must destroy its fabric agent to let go of its own blocks

Pure: knows messages and numbers; no clock, loop, socket or engine. The pools interpret the effects.
"""
