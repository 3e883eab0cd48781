"""A tiny random model, a tokenizer and two tasks: what the tests of the accuracy lab run on."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from tinyserve.eval.samples import Output, Sample
from tinyserve_ops import SparseConfig

transformers.logging.set_verbosity_error()

VOCABULARY = 97
NUM_LAYERS = 3
SMALL = SparseConfig(page_size=8, token_budget=48, dense_layers=1)


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "attn_implementation": "sdpa",
}


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """A random Llama with grouped kv heads, whose weights are spread so that its attention is not flat."""
    torch.manual_seed(seed)
    return _spread(LlamaForCausalLM(LlamaConfig(**{**_SIZES, **changes})).eval()).to(dtype)


def tiny_mistral(window: int) -> MistralForCausalLM:
    """The same with a sliding window."""
    torch.manual_seed(0)
    return _spread(MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=window)).eval())


def tiny_opt() -> OPTForCausalLM:
    """A model of another family, with learnt positions."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = OPTConfig(vocab_size=VOCABULARY, word_embed_proj_dim=64, max_position_embeddings=512, **sizes)
    config.eos_token_id = None
    return _spread(OPTForCausalLM(config).eval())


def _spread(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


class NumberTokenizer:
    """Token 7 is the text "7 "."""

    eos_token_id: int | None = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


def _tokens(seed: str, count: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=count))


class GenerateTask:
    """Greedy tokens after a random prompt whose last 10 tokens are the question; scored by their sum's
    parity.
    """

    name = "generate"
    metric = "even"

    def samples(self, tokenizer: Any, *, num_samples: int, num_tokens: int, seed: int) -> Iterator[Sample]:
        for index in range(num_samples):
            prompt = _tokens(f"{self.name} {seed} {index}", num_tokens)
            yield Sample(
                sample_id=f"{index}",
                prompt_ids=prompt,
                num_dense=max(0, num_tokens - 10),
                max_new_tokens=6,
                details={"index": index},
            )

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        return {"even": float(sum(output.token_ids) % 2 == 0)}

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        return {"even": sum(score["even"] for score in scores) / len(scores)}


class ScoreTask:
    """The log-probability of two random continuations, as a perplexity."""

    name = "score"
    metric = "perplexity"

    def samples(self, tokenizer: Any, *, num_samples: int, num_tokens: int, seed: int) -> Iterator[Sample]:
        for index in range(num_samples):
            tokens = _tokens(f"{self.name} {seed} {index}", num_tokens + 12)
            yield Sample(
                sample_id=f"{index}",
                prompt_ids=tokens[:num_tokens],
                num_dense=num_tokens - 1,
                continuations=(tokens[num_tokens:], tokens[num_tokens : num_tokens + 1]),
            )

    def score(self, sample: Sample, output: Output) -> dict[str, float]:
        return {"nll": -sum(output.logprobs[0]) / len(output.logprobs[0])}

    def summary(self, scores: Sequence[dict[str, float]]) -> dict[str, float]:
        return {"perplexity": math.exp(sum(score["nll"] for score in scores) / len(scores))}


def only_sample(task: Any, num_tokens: int = 120) -> Sample:
    """The first sample of a task."""
    return next(task.samples(NumberTokenizer(), num_samples=1, num_tokens=num_tokens, seed=42))
