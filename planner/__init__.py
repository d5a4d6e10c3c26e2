"""Models of a deployment in virtual time, running the real decisions of the other packages.

    protocol    a whole cluster under random faults; checks what the handoff promises

Deterministic; knows no process and no network."""
