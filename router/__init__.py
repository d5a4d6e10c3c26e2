"""The router: the OpenAI API, text (templates, tokenizing, stop strings), and where requests run.

Knows text and policies, not tensors; never imports torch. `policy` is pure and shared with the
simulator. Workers know token ids only.
"""
