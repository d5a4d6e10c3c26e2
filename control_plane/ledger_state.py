"""What the cache ledger's writer writes and its readers believe, without I/O. Pure."""
