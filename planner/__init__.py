"""Models of a deployment: virtual time, simulation and capacity, running the real decisions of
the other packages.

Pure; knows no process and no network."""
