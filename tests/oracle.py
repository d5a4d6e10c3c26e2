"""transformers in float32 on the very weights that Dovetail loads: the judge of every logit."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from deploy.model_path import resolve_model
from engine.models.read_spec import read_spec
from engine.models.spec import ModelSpec
from engine.models.torch_weights import open_tensors

REFERENCE_MARGIN = 1e-3
"""Arg-max must agree wherever the reference's two best logits are further apart."""


class Oracle:
    """A reference model built from a model file.

    Args:
        path: a Hugging Face directory or a GGUF file.
    """

    def __init__(self, path: Path) -> None:
        # Beside other tests on the same cores, two threads wait for each other at every operation.
        torch.set_num_threads(1)
        self.path = path
        self.spec = read_spec(path)
        self._model = build_reference(self.spec, open_tensors(self.spec, path))

    @torch.inference_mode()
    def reference_logits(self, token_ids: list[int], last: int = 0) -> Tensor:
        """Return float32 [len(token_ids), vocab_size]; row i scores token i + 1.

        Args:
            last: return only so many rows, the last ones; 0: all.
        """
        ids = torch.tensor([token_ids])
        return self._model(ids, use_cache=False, logits_to_keep=last).logits[0]

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return `num_tokens` greedy tokens after the prompt; EOS does not stop it."""
        model: Any = self._model  # its mixins do not type-check
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return output[0, len(prompt) :].tolist()


def build_reference(spec: ModelSpec, weights: Mapping[str, Tensor]) -> LlamaForCausalLM:
    """Return transformers' model with these weights, in float32."""
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=spec.tied_embeddings,
        max_position_embeddings=spec.max_positions,
        bos_token_id=spec.bos_token_id,
        eos_token_id=list(spec.eos_token_ids) or None,
    )
    with no_init_weights():
        model = LlamaForCausalLM(config)
    state = {name: weight.float() for name, weight in weights.items()}
    if spec.tied_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


@functools.cache
def smollm2() -> Oracle:
    """Return the default model's oracle; loaded once a process (about 4 s)."""
    return Oracle(resolve_model(""))


def disagreements(ours: Tensor, reference: Tensor) -> list[int]:
    """Return rows whose arg-max differs although the reference's margin is clear."""
    best = reference.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] >= REFERENCE_MARGIN
    differs = ours.argmax(dim=-1) != reference.argmax(dim=-1)
    return (clear & differs).nonzero()[:, 0].tolist()
