"""Models from a hub: ORG/NAME read, the needed files chosen, and downloaded into the shared cache.

Speaks Hugging Face's protocol through `huggingface_hub`, which only `deploy.hub.download` and what
it alone imports may import: a start from local files must not pay for it.
"""
