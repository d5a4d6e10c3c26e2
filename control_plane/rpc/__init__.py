"""Multiplexed gRPC streams between router and worker, and between decode and prefill worker."""
