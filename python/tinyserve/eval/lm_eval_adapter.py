"""An lm-eval model, `tinyserve`: any lm-eval task under any policy.

Requests go the way of our own tasks: the context but its last token is prefilled densely, everything behind
it one token at a time. The only module that imports lm_eval (pip install lm-eval); importing it registers the
model.

    python -m tinyserve.eval.lm_eval_adapter --model tinyserve \\
        --model_args pretrained=FOLDER,policy=query_aware,token_budget=512 --tasks hellaswag --limit 50
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from tinyserve.eval.methods import Method, named_policy
from tinyserve.eval.runner import Failure, MethodRun, Runner
from tinyserve.eval.samples import Sample
from tinyserve.models import load_model, smollm2_folder
from tinyserve.progress import bar
from tinyserve_ops import SparseConfig
from tinyserve_ops.hf.support import max_positions

__all__ = ["TinyServeLM"]

_log = logging.getLogger(__name__)

_DEFAULT_NEW_TOKENS = 256


@register_model("tinyserve")
class TinyServeLM(TemplateLM):
    """One model under one policy.

    Args:
        pretrained: a Hugging Face model folder, or a model object (then `tokenizer` is needed); default
            SmolLM2.
        policy: its name, with its options as in `snapkv:window=16`.
        dtype: of the weights, where a folder is loaded.
        max_length: tokens of context and continuation; default the model's positions.
        batch_size: 1; requests run one after the other.
        device: the CPU is used, with a warning where another one is named.
        config: fields of `SparseConfig`.

    Raises:
        ValueError: an option that is not supported, by name.
    """

    def __init__(
        self,
        pretrained: Any = None,
        *,
        tokenizer: Any = None,
        policy: str = "query_aware",
        dtype: str = "float32",
        max_length: int | None = None,
        batch_size: int | str = 1,
        device: str = "cpu",
        **config: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) != "1":
            raise ValueError(f"batch_size: expected 1 (requests run one after the other), got {batch_size!r}")
        if device != "cpu":  # lm-eval's own default can't be told from a wish
            _log.warning("device: runs on the CPU, got %r", device)
        if pretrained is None or isinstance(pretrained, (str, Path)):
            folder = smollm2_folder() if pretrained is None else Path(pretrained)
            pretrained, tokenizer = load_model(folder, getattr(torch, dtype))
        self.tokenizer = tokenizer
        self.method = Method(policy=named_policy(policy), config=SparseConfig(**config))
        self.scored_tokens = 0
        self._runner = Runner(pretrained, tokenizer, measured_steps=0)
        limit = max_length if max_length is not None else max_positions(pretrained.config)
        if limit is None:
            raise ValueError("max_length: expected a number of tokens (the model names none), got None")
        self.max_length = limit

    @property
    def eot_token_id(self) -> int:
        """The end of a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text that has no context: where texts begin, or where they end."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation, by the tokenizer's template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; special tokens only where asked for."""
        return list(self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens)))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in disjoint windows of the model's length, as lm-eval defines it.
        Every token of a window goes alone, which takes time.
        """
        results = []
        for request in requests:
            (text,) = request.args
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(("", text), *utils.make_disjoint_window(window)) for window in windows]
            total = sum(found for found, _ in self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            results.append(total)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy texts up to a stop sequence; sampling is refused."""
        results = []
        for request in _with_bar(requests, "generate_until", disable_tqdm):
            context, settings = request.args
            until, max_new_tokens = _generation(settings)
            ids = self.tok_encode(context)[-max(self.max_length - max_new_tokens, 1) :]
            sample = Sample(
                sample_id="request",
                prompt_ids=tuple(ids) or (self.prefix_token_id,),
                num_dense=max(len(ids) - 1, 0),
                max_new_tokens=max_new_tokens,
            )

            def has_stop(token_ids: list[int], until: Sequence[str] = until) -> bool:
                text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
                return any(stop in text for stop in until)

            text = self._run(sample, has_stop).output.text
            for stop in until:
                text = text.split(stop)[0]
            self.cache_hook.add_partial("generate_until", request.args, text)
            results.append(text)
        return results

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Requests of one context after each other share its prefill."""
        results: list[tuple[float, bool]] = []
        groups: list[tuple[tuple[int, ...], list[tuple[Any, tuple[int, ...]]]]] = []
        for key, context, continuation in requests:
            if not continuation:
                raise ValueError(f"continuation: expected at least one token, got none in {key}")
            # The last token of the continuation is never fed.
            room = max(self.max_length + 1 - len(continuation), 1)
            prompt = tuple(context[-room:])
            if not groups or groups[-1][0] != prompt:
                groups.append((prompt, []))
            groups[-1][1].append((key, tuple(continuation)))
        for prompt, asked in _with_bar(groups, "loglikelihood", disable_tqdm):
            sample = Sample(
                sample_id="request",
                prompt_ids=prompt,
                num_dense=len(prompt) - 1,
                continuations=tuple(continuation for _, continuation in asked),
            )
            output = self._run(sample).output
            for (key, _), logprobs, greedy in zip(asked, output.logprobs, output.greedy, strict=True):
                results.append((sum(logprobs), greedy))
                if key[0]:  # windows of a rolling request are no requests of their own
                    self.cache_hook.add_partial("loglikelihood", key, results[-1])
        return results

    def _run(self, sample: Sample, stop: Any = None) -> MethodRun:
        (run,) = self._runner.run(sample, [self.method], stop=stop)
        if isinstance(run, Failure):
            raise run.error
        self.scored_tokens += run.scored_tokens
        return run


def _generation(settings: dict[str, Any]) -> tuple[list[str], int]:
    """Stop sequences and the most new tokens; refuses what is not greedy decoding."""
    if settings.get("do_sample") and settings.get("temperature", 1.0) not in (0, 0.0):
        raise ValueError(f"do_sample: expected greedy decoding, got {settings}")
    until = settings.get("until") or []
    limit = settings.get("max_gen_toks", settings.get("max_new_tokens", _DEFAULT_NEW_TOKENS))
    return [until] if isinstance(until, str) else list(until), int(limit)


def _with_bar(items: Sequence[Any], what: str, disabled: bool) -> Iterable[Any]:
    return items if disabled else bar(what, total=len(items), unit=" contexts", items=items)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
