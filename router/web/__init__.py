"""HTTP: routes, server-sent events, errors, metrics, and the granian server that carries them.

The token path is plain ASGI with msgspec; FastAPI serves the control routes. Requests reach workers
through `router.dispatch.interface.Dispatcher` alone.
"""
