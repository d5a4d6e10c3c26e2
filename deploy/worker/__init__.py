"""One worker process: engine, fabric, streams, registration and HTTP, wired once."""
