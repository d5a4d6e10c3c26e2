"""llama.cpp's mean KL from reference logits, in its own environment:
`python -m bench.peer_llama_kl MODEL.gguf TOKENS.npy LOGITS.npy`."""

from __future__ import annotations

import sys
from typing import Any

import llama_cpp  # pyright: ignore[reportMissingImports] - in its own environment
import numpy as np

from bench.kl import mean_kl


def main() -> None:
    """Print it."""
    tokens = np.load(sys.argv[2])
    reference: Any = np.load(sys.argv[3], mmap_mode="r")
    llama = llama_cpp.Llama(
        sys.argv[1], n_ctx=len(tokens) + 8, n_batch=512, logits_all=True, n_threads=2, verbose=False
    )
    llama.eval(tokens.tolist())
    sys.stdout.write(f"{mean_kl(reference, llama.scores[: len(tokens)])}\n")


if __name__ == "__main__":
    main()
