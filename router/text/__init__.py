"""Text and token ids: tokenizers, chat templates, incremental detokenizing, stop strings.

Knows the `tokenizers` library and Jinja, but no HTTP and no torch. Workers know token ids only, so
everything that looks at text happens here.
"""
