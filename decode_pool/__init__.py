"""The decode worker: reservation, asking for prefill, receiving, joining, local prefill, failure
handling."""
