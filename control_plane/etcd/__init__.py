"""etcd as this project uses it: a client with deadlines, leases, watches without gaps, and a server
of our own for one machine.

Knows keys, values and revisions; not what any of them means.
"""
