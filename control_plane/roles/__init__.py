"""What a worker is there for: which pool takes new work, switches of the role, drains."""
