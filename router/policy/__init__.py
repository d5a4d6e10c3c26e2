"""Where a request runs: prefix index, cost model, calibration and choice.

Pure, and shared with the simulator: frozen views of request and workers in, a frozen `Decision` or
`Refusal` out; time and dice are arguments. Knows nothing of streams, processes or text.
"""
