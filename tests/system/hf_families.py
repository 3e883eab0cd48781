"""Tiny random models of the seven families, and greedy comparison that counts near-ties instead of hiding
them.

Weights are spread (times three) so that random models rarely produce near-ties; the ones left are recognised
by the reference's own two best logits.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

transformers.logging.set_verbosity_error()

VOCABULARY = 211
NO_EOS = VOCABULARY + 7  # never produced, so that every run has the length it was asked for
NEAR_TIE = 1e-4

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": NO_EOS,
}
_IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": NO_EOS}


def family_config(name: str, **changes: Any) -> Any:
    """Config of a tiny model of a family."""
    if name == "gpt2":
        return GPT2Config(**{**_IDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, **changes})
    if name == "llama":
        return LlamaConfig(**{**_COMMON, "num_key_value_heads": 2, **changes})
    if name == "opt":
        sizes = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        return OPTConfig(
            **{**_IDS, **sizes, "word_embed_proj_dim": 64, "max_position_embeddings": 512, **changes}
        )
    if name == "qwen2":
        return Qwen2Config(**{**_COMMON, "num_key_value_heads": 2, **changes})
    if name == "qwen3":  # head_dim is not hidden_size / num_attention_heads
        return Qwen3Config(**{**_COMMON, "num_key_value_heads": 2, "head_dim": 24, **changes})
    if name == "mistral":
        return MistralConfig(**{**_COMMON, "num_key_value_heads": 2, "sliding_window": 40, **changes})
    if name == "gemma3":
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        own = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 32}
        return Gemma3TextConfig(
            **{**_COMMON, **own, "layer_types": layers, "query_pre_attn_scalar": 16, **changes}
        )
    raise ValueError(f"name: expected one of {FAMILIES}, got {name!r}")


FAMILIES = ("gpt2", "llama", "opt", "qwen2", "qwen3", "mistral", "gemma3")


def tiny_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of a family, in eval mode, with sdpa attention; the same seed gives the same weights."""
    torch.manual_seed(seed)
    config = copy.deepcopy(family_config(name, **changes))
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config).eval().to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.generation_config.eos_token_id = NO_EOS
    model.generation_config.pad_token_id = 0
    return model.to(dtype)


def tokens(batch_size: int, length: int, seed: int = 3) -> torch.Tensor:
    """Random token ids [batch_size, length] without special ones."""
    return torch.randint(2, VOCABULARY, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def left_padded(ids: torch.Tensor, pads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids with the first `pads[b]` of row b replaced by padding, attention mask)."""
    mask = torch.ones_like(ids)
    for row, n in enumerate(pads):
        mask[row, :n] = 0
    return ids.masked_fill(mask == 0, 0), mask


def cache_argument(model: Any) -> str:
    """Name of the cache argument of the installed transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def greedy(
    model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, new: int = 24, **keywords: Any
) -> torch.Tensor:
    """Greedy continuation by `new` tokens."""
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new, **keywords)


@dataclass
class Comparison:
    """Rows equal, rows that differ at a near-tie of the reference, rows that differ otherwise."""

    rows: int
    near_ties: int
    different: int


def compare_greedy(
    reference: Any, expected: torch.Tensor, got: torch.Tensor, mask: torch.Tensor | None
) -> Comparison:
    """Compares greedy outputs; a first difference counts as near-tie when the reference's two best logits lie
    within 1e-4.
    """
    result = Comparison(expected.size(0), 0, 0)
    for row in range(expected.size(0)):
        if torch.equal(expected[row], got[row]):
            continue
        first = int((expected[row] != got[row]).nonzero()[0])
        prefix = expected[row : row + 1, :first]
        if mask is not None:  # without padding, as a solo run
            prefix = prefix[:, int((mask[row] == 0).sum()) :]
        with torch.no_grad():
            best = reference(prefix).logits[0, -1].float().topk(2).values
        if float(best[0] - best[1]) <= NEAR_TIE:
            result.near_ties += 1
        else:
            result.different += 1
    return result


def forward(
    model: Any, ids: torch.Tensor, cache: Any = None, mask: torch.Tensor | None = None, **keywords: Any
) -> torch.Tensor:
    """Logits; position ids count real tokens."""
    if mask is not None and mask.dim() == 2 and "position_ids" not in keywords:
        keywords["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.size(1) :]
    if cache is not None:
        keywords[cache_argument(model)] = cache
    with torch.no_grad():
        return model(ids, attention_mask=mask, **keywords).logits
