"""A fabric inside one process: the transport's fake for tests and simulation, faults included."""
