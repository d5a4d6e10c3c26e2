"""KV memory as pure accounting: block pool, block tables, radix cache.

Knows block ids, reference counts and block hashes; never a byte, a tensor, a clock or a request.
`KvMemory` joins the pool and the cache; nobody else changes either.
"""
