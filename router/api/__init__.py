"""The OpenAI API's words: what a request may say, what it means, and the shapes of the answers.

Knows JSON and msgspec, but no HTTP server, no model and no worker. Field names, ranges and
extensions are OpenAI's and vLLM's.
"""
