"""The same weights as tensors, for executors that compute in torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from engine.models.spec import ModelSpec
from engine.models.weights import StoredWeight, Weights, open_weights

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorWeights(Mapping[str, Tensor]):
    """Tensors on the CPU by name; each is made anew when it is asked for.

    Safetensors keep their element type; GGUF tensors are dequantized to float32.
    """

    def __init__(self, weights: Weights, *, as_stored: bool) -> None:
        self._weights = weights
        self._as_stored = as_stored

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        return as_tensor(weight) if self._as_stored else torch.as_tensor(weight.float32())

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def open_tensors(spec: ModelSpec, path: Path) -> TensorWeights:
    """Return every weight of the model, none of them read yet; see `open_weights`."""
    return TensorWeights(open_weights(spec, path), as_stored=path.is_dir())


def as_tensor(weight: StoredWeight) -> Tensor:
    """Return a copy of a float weight in its own element type."""
    untyped: Any = torch.as_tensor(np.array(weight.raw))  # a copy: the file's map is read-only
    return untyped.view(_DTYPES[weight.dtype]).reshape(weight.shape)
