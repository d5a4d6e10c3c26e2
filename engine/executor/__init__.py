"""Steps: a StepPlan in, tokens out, behind one interface (`interface`).

`native_executor` computes on CPUs in one C++ library and needs no torch; `torch_executor` is for
what that cannot run, and for devices; `mock_executor` computes tokens from the pool's bytes. They
own slots and weights, never KV memory, and know neither text nor requests.
"""
