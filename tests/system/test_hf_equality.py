"""With a budget that covers everything, an enabled model says what the unpatched model says: seven families,
every way to decode.

Each cell also asserts how many attention calls went through page selection, so a silent fall-back to dense
attention can't pass. The table of all cells goes to `build/reports/`, as JSON for this transformers version
and as Markdown over all versions run so far.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from hf_families import (  # noqa: E402
    FAMILIES,
    NO_EOS,
    VOCABULARY,
    cache_argument,
    compare_greedy,
    greedy,
    left_padded,
    tiny_model,
    tokens,
)
from transformers import DynamicCache, PreTrainedTokenizerFast, TextIteratorStreamer, pipeline  # noqa: E402

import tinyserve_ops  # noqa: E402
from tinyserve_ops.hf import Handle, PackedBatch, new_paged_cache  # noqa: E402

REPORTS = Path(__file__).resolve().parents[2] / "build" / "reports"
PROMPT, NEW = 70, 12  # longer than both sliding windows (40 and 32), and than four pages
COVERS_ALL = {
    "token_budget": 1024,
    "dense_layers": 1,
}  # one dense layer, so that both kinds of single-token steps are seen
STEPS = NEW - 1  # single-token forwards of a greedy run


@functools.lru_cache(maxsize=2)
def models(family: str) -> tuple[Any, Any, Any]:
    """(unpatched, the same weights to be enabled, a draft model)."""
    return tiny_model(family), tiny_model(family), tiny_model(family, seed=1)


@functools.lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    """One word per token id: "t17" is 17."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", padding_side="left", model_input_names=names
    )


def text_of(ids: torch.Tensor) -> str:
    return " ".join(f"t{i}" for i in ids.tolist())


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([[int(word) for word in text.replace("t", " ").split()]])


@dataclass
class Cell:
    """What one feature gave on both models, and the sparse steps it must have taken per selecting layer
    (None: any number).
    """

    expected: torch.Tensor
    got: torch.Tensor
    steps: int | None
    mask: torch.Tensor | None = None
    greedy: bool = True
    reference: Any = None


Feature = Callable[[str, Handle], Cell]
FEATURES: dict[str, Feature] = {}


def feature(name: str) -> Callable[[Feature], Feature]:
    def add(function: Feature) -> Feature:
        FEATURES[name] = function
        return function

    return add


def batch_of_three() -> tuple[torch.Tensor, torch.Tensor]:
    return left_padded(tokens(3, PROMPT), [37, 5, 0])


def both(
    family: str, handle: Handle, ids: torch.Tensor, mask: torch.Tensor | None = None, **keywords: Any
) -> Any:
    reference = models(family)[0]
    expected = greedy(reference, ids, mask, NEW, **keywords)
    return expected, greedy(handle.model, ids, mask, NEW, **keywords)


@feature("greedy, batch 1")
def _greedy_one(family: str, handle: Handle) -> Cell:
    return Cell(*both(family, handle, tokens(1, PROMPT)), STEPS)


@feature("greedy, batch 3")
def _greedy_three(family: str, handle: Handle) -> Cell:
    return Cell(*both(family, handle, tokens(3, PROMPT)), 3 * STEPS)


@feature("left padding, batch 3")
def _left_padding(family: str, handle: Handle) -> Cell:
    ids, mask = batch_of_three()
    return Cell(*both(family, handle, ids, mask), 3 * STEPS, mask)


@feature("beam search")
def _beams(family: str, handle: Handle) -> Cell:
    return Cell(*both(family, handle, tokens(1, PROMPT), num_beams=3), 3 * STEPS, greedy=False)


@feature("beam search, left padding")
def _beams_padded(family: str, handle: Handle) -> Cell:
    ids, mask = batch_of_three()
    return Cell(*both(family, handle, ids, mask, num_beams=3), 9 * STEPS, greedy=False)


@feature("beam search, returning 3")
def _beams_returning_three(family: str, handle: Handle) -> Cell:
    found = both(family, handle, tokens(1, PROMPT), num_beams=3, num_return_sequences=3)
    return Cell(*found, 3 * STEPS, greedy=False)


@feature("assisted decoding")
def _assisted(family: str, handle: Handle) -> Cell:
    return Cell(*both(family, handle, tokens(1, PROMPT), assistant_model=models(family)[2]), None)


@feature("prompt lookup")
def _prompt_lookup(family: str, handle: Handle) -> Cell:
    ids = tokens(1, 18).repeat(1, 4)
    return Cell(*both(family, handle, ids, prompt_lookup_num_tokens=4), None)


@feature("chunked prefill")
def _chunked_prefill(family: str, handle: Handle) -> Cell:
    ids = tokens(1, PROMPT)
    expected = greedy(models(family)[0], ids, None, NEW)  # some versions can't chunk the unpatched model
    last_token_alone = transformers.__version__.startswith(
        "4."
    )  # there the prompt's last token is a step of its own
    got = greedy(handle.model, ids, None, NEW, prefill_chunk_size=32)
    return Cell(expected, got, STEPS + last_token_alone)


@feature("continued chat")
def _continued_chat(family: str, handle: Handle) -> Cell:
    cache = {cache_argument(handle.model): handle.new_cache()}
    first = greedy(handle.model, tokens(1, PROMPT), None, NEW, **cache)
    ids = torch.cat([first, tokens(1, 9, seed=4)], dim=1)
    return Cell(
        greedy(models(family)[0], ids, None, NEW), greedy(handle.model, ids, None, NEW, **cache), 2 * STEPS
    )


@feature("continued chat, left padding")
def _continued_chat_padded(family: str, handle: Handle) -> Cell:
    cache = {cache_argument(handle.model): handle.new_cache()}
    ids, mask = batch_of_three()
    first = greedy(handle.model, ids, mask, NEW, **cache)
    ids = torch.cat([first, tokens(3, 9, seed=4)], dim=1)
    mask = torch.cat([mask, torch.ones(3, NEW + 9, dtype=mask.dtype)], dim=1)
    expected = greedy(models(family)[0], ids, mask, NEW)
    return Cell(expected, greedy(handle.model, ids, mask, NEW, **cache), 6 * STEPS, mask)


@feature("user's DynamicCache")
def _dynamic_cache(family: str, handle: Handle) -> Cell:
    ids, mask = batch_of_three()
    reference, name = models(family)[0], cache_argument(handle.model)
    expected = greedy(reference, ids, mask, NEW, **{name: DynamicCache(config=reference.config)})
    return Cell(
        expected,
        greedy(handle.model, ids, mask, NEW, **{name: DynamicCache(config=handle.model.config)}),
        0,
        mask,
    )


@feature("static cache")
def _static_cache(family: str, handle: Handle) -> Cell:
    ids, mask = batch_of_three()
    return Cell(*both(family, handle, ids, mask, cache_implementation="static"), 0, mask)


@feature("no cache")
def _no_cache(family: str, handle: Handle) -> Cell:
    return Cell(*both(family, handle, tokens(1, PROMPT), use_cache=False), 0)


@feature("packed ragged batch")
def _packed(family: str, handle: Handle) -> Cell:
    """Three requests of different length join at different steps, so forwards mix prefill and decode."""
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (50, 9, 23)]
    model, kv = handle.model, new_paged_cache(handle.model, handle.config, max_tokens=256)
    batch = PackedBatch(model, kv)
    sequences = [kv.new_sequence() for _ in prompts]
    outputs: list[list[int]] = [[], [], []]
    with torch.no_grad():
        for step in range(NEW + 2):
            rows = []
            for i, prompt in enumerate(prompts):
                if step >= i and len(outputs[i]) < NEW:
                    rows.append((i, outputs[i][-1:] if outputs[i] else prompt))
            logits = batch.last_logits(model(**batch.inputs([(sequences[i], new) for i, new in rows])))
            for (i, _), token in zip(rows, logits.argmax(-1).tolist(), strict=True):
                outputs[i].append(token)
    _packed_steps[0] = kv.stats().sparse_steps
    kv.check()
    reference = models(family)[0]
    expected = [greedy(reference, torch.tensor([p]), None, NEW)[0] for p in prompts]
    got = [torch.tensor(p + o) for p, o in zip(prompts, outputs, strict=True)]
    return Cell(_stack(expected), _stack(got), 3 * STEPS)


_packed_steps = [0]


def _stack(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=NO_EOS)


@feature("pipeline")
def _pipeline(family: str, handle: Handle) -> Cell:
    ids = tokens(1, PROMPT)
    made = pipeline("text-generation", model=handle.model, tokenizer=tokenizer())
    text = made(text_of(ids[0]), max_new_tokens=NEW, do_sample=False, return_full_text=False)[0][
        "generated_text"
    ]
    return Cell(greedy(models(family)[0], ids, None, NEW), torch.cat([ids, ids_of(text)], dim=1), STEPS)


@feature("streamer in a thread")
def _streamer(family: str, handle: Handle) -> Cell:
    ids = tokens(1, PROMPT)
    streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=60)
    thread = threading.Thread(
        target=greedy, args=(handle.model, ids, None, NEW), kwargs={"streamer": streamer}
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    return Cell(greedy(models(family)[0], ids, None, NEW), torch.cat([ids, ids_of(text)], dim=1), STEPS)


def expected_layers(model: Any, handle: Handle) -> int:
    return model.config.num_hidden_layers - handle.config.dense_layers


RESULTS: dict[str, dict[str, str]] = {}


@pytest.fixture(scope="module", autouse=True)
def _report() -> Iterator[None]:
    RESULTS.clear()
    yield
    write_report(REPORTS, transformers.__version__, RESULTS)


def write_report(folder: Path, version: str, results: dict[str, dict[str, str]]) -> None:
    """`hf_equality_<version>.json`, and one Markdown table per version found in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"hf_equality_{version}.json").write_text(
        json.dumps({"transformers": version, "cells": results}, indent=1)
    )
    lines = ["# Equality of enabled models with unpatched ones", ""]
    lines += [
        "A cell says how many rows were compared and how many attention calls went through page selection.",
        "",
    ]
    for path in sorted(folder.glob("hf_equality_*.json")):
        found = json.loads(path.read_text())
        families = [f for f in FAMILIES if any(f in row for row in found["cells"].values())]
        lines += [
            f"## transformers {found['transformers']}",
            "",
            "| feature | " + " | ".join(families) + " |",
        ]
        lines += ["|---" * (len(families) + 1) + "|"]
        for name, row in found["cells"].items():
            lines.append(f"| {name} | " + " | ".join(row.get(f, "") for f in families) + " |")
        lines.append("")
    (folder / "hf_equality.md").write_text("\n".join(lines))


def note(name: str, family: str, text: str) -> None:
    RESULTS.setdefault(name, {})[family] = text


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_the_unpatched_model(family: str, name: str) -> None:
    reference, model, _ = models(family)
    with tinyserve_ops.enable(model, **COVERS_ALL) as handle:
        _packed_steps[0] = 0
        cell = FEATURES[name](family, handle)
        steps = _packed_steps[0] or (handle.stats().sparse_steps if cell.steps != 0 else 0)
        if cell.steps == 0:
            with pytest.raises(RuntimeError, match="cache"):
                handle.stats()
        elif cell.steps is None:  # mostly verification of several tokens at once, which is dense by design
            assert handle.stats().prefill_tokens > PROMPT + NEW / 2
        else:
            assert steps == cell.steps * expected_layers(model, handle)
    assert cell.expected.shape == cell.got.shape
    if not cell.greedy:
        assert torch.equal(cell.expected, cell.got)
        note(name, family, f"{len(cell.got)} equal, {steps} sparse")
        return
    found = compare_greedy(reference, cell.expected, cell.got, cell.mask)
    note(name, family, f"{found.rows - found.near_ties} equal, {found.near_ties} near-tie, {steps} sparse")
    assert found.different == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_peft_model_says_the_same(family: str) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        model = tiny_model(family)
        torch.manual_seed(11)
        targets = ["c_attn"] if family == "gpt2" else ["q_proj", "v_proj"]
        lora = peft.LoraConfig(
            r=4,
            target_modules=targets,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            fan_in_fan_out=family == "gpt2",
        )
        return peft.get_peft_model(model, lora).eval()

    ids, mask = batch_of_three()
    expected = adapted().generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    plain = greedy(models(family)[0], ids, mask, NEW)
    assert not torch.equal(expected, plain)  # the adapter matters
    model = adapted()
    with tinyserve_ops.enable(model, **COVERS_ALL) as handle:
        got = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        steps = handle.stats().sparse_steps
        assert steps == 3 * STEPS * expected_layers(handle.model, handle)
    assert torch.equal(expected, got)
    note("PEFT", family, f"{len(got)} equal, {steps} sparse")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_plain_forwards_are_those_of_the_unpatched_model(family: str) -> None:
    reference, model, _ = models(family)
    ids, mask = batch_of_three()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    more, ones = tokens(3, 5, seed=8), torch.ones(3, 5, dtype=mask.dtype)
    whole_mask = torch.cat([mask, ones], dim=1)
    whole_positions = torch.cat([positions, positions[:, -1:] + torch.arange(1, 6)], dim=1)
    with torch.no_grad(), tinyserve_ops.enable(model, **COVERS_ALL) as handle:
        expected = reference(
            torch.cat([ids, more], 1), attention_mask=whole_mask, position_ids=whole_positions
        ).logits
        cache = {cache_argument(model): handle.new_cache()}
        got = [model(ids, attention_mask=mask, position_ids=positions, **cache).logits]
        for i in range(5):
            until = PROMPT + i + 1
            step = {
                "attention_mask": whole_mask[:, :until],
                "position_ids": whole_positions[:, until - 1 : until],
            }
            got.append(model(more[:, i : i + 1], **step, **cache).logits)
        steps = handle.stats().sparse_steps
        assert steps == 15 * expected_layers(model, handle)
    real = whole_mask.bool()
    torch.testing.assert_close(torch.cat(got, 1)[real], expected[real], atol=2e-4, rtol=1e-3)
    note("forward logits", family, f"3 equal, {steps} sparse")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_budget_leaves_pages_out_and_changes_the_logits(family: str) -> None:
    reference, model, _ = models(family)
    ids = tokens(1, PROMPT)
    keywords = {"output_logits": True, "return_dict_in_generate": True}
    small = {"token_budget": 16, "num_sink_pages": 0, "num_recent_pages": 1, "dense_layers": 0}
    with tinyserve_ops.enable(model, **small) as handle:
        got = greedy(model, ids, None, NEW, **keywords).logits
        stats = handle.stats()
    expected = greedy(reference, ids, None, NEW, **keywords).logits
    torch.testing.assert_close(got[0], expected[0], atol=2e-4, rtol=1e-3)  # prefill is dense
    assert (got[1] - expected[1]).abs().max() > 0.01
    assert stats.selection_engaged
    assert stats.pages_read < stats.pages_visible
    assert stats.dense_steps == 0
    assert stats.sparse_steps == STEPS * model.config.num_hidden_layers
    note("budget of one page", family, f"differs, {stats.sparse_steps} sparse")


def decode_logits(model: Any, ids: torch.Tensor, prompt: int, cache: Any) -> torch.Tensor:
    """Logits of teacher-forced decoding: a prefill of `prompt` tokens, then one token at a time."""
    cache = {cache_argument(model): cache}
    with torch.no_grad():
        model(ids[:, :prompt], **cache)
        return torch.cat(
            [model(ids[:, i : i + 1], **cache).logits for i in range(prompt, ids.size(1))], dim=1
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_errs_at_most_twice_as_much_as_sdpa(family: str, dtype: torch.dtype) -> None:
    ids = tokens(2, PROMPT + 10, seed=6)
    reference, model = tiny_model(family, dtype=dtype), tiny_model(family, dtype=dtype)
    exact = tiny_model(family, dtype=dtype).to(
        torch.float64
    )  # the rounded weights, so that only arithmetic differs
    expected = decode_logits(exact, ids, PROMPT, DynamicCache(config=exact.config))
    unpatched = decode_logits(reference, ids, PROMPT, DynamicCache(config=reference.config))
    with tinyserve_ops.enable(model, **COVERS_ALL) as handle:
        got = decode_logits(model, ids, PROMPT, handle.new_cache())
        assert handle.stats().sparse_steps == 20 * expected_layers(model, handle)
    ours, theirs = ((x.double() - expected).square().mean().sqrt().item() for x in (got, unpatched))
    name = "error vs float64, fp16" if dtype == torch.float16 else "error vs float64, bf16"
    note(name, family, f"{ours / theirs:.2f} x sdpa")
    assert ours <= 2 * theirs
