"""Benchmarks: `python -m bench [NAME...]` prints a table, and a line `BENCH {json}` a figure.

Contenders are interleaved and compared by medians; nothing here is a test, and no test is timed.
"""
