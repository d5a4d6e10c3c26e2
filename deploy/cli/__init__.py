"""The command line: its grammar, one function a command, and what people read of a cluster."""
