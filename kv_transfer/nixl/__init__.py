"""The default transport: NIXL over UCX."""
