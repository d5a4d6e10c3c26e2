"""The API's document: /openapi.json and a page that shows it, /docs.

`requests` and `answers` describe the bodies as types; nothing is read or written with them. Reading
is `router.api`'s, whose refusals name what is wrong; a test holds that both know the same fields.
"""
