"""HTTP: the server, routes, server-sent events, errors, metrics, and the API's document.

    server -> connection -> exchange -> app -> routing -> an endpoint

The server speaks HTTP/1.1 and ASGI; endpoints are plain ASGI with msgspec. Requests reach workers
through `router.dispatch.interface.Dispatcher` alone.
"""
