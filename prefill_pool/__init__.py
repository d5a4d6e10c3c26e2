"""The prefill worker: admission, the chunk pipeline, and pushing finished blocks while
computing."""
