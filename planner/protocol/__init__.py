"""A whole cluster in one thread and in virtual time: the real pools, engines, state machines and
dispatcher over a simulated network, fabric and etcd, and everything that can go wrong with them.

    virtual_loop, process   one heap of events; processes that freeze and die
    network, connection, nic, etcd      what lies between processes
    engine_driver, transfer_driver, replica, worker, worker_end, router, client, cluster
    scenario, faults        what a seed means: faults, and an operator's orders
    invariants, blocks, idleness        what must hold (handoff.md)
    simulation, shrink      one run; the fewest faults that still show a violation

Nothing here reads a clock, a socket or a die of its own: the same scenario gives the same events.
"""
