"""Continuous batching as a pure state machine: `schedule() -> StepPlan`, `apply(StepResult)`.

Queues, admission forecast, chunking, preemption, forks. Knows token ids and block ids; no clock, no
dice, no tensor, no bytes. The simulator runs this very code.
"""
