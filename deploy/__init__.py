"""The composition root and the command line: the only place that wires the packages together."""
