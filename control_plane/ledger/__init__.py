"""The cache ledger in etcd: which block hashes every worker's caches hold. A hint for routing."""
