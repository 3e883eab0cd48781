"""Faults that attention replacements had elsewhere, tried on this one, and everything that `enable` refuses by name."""

from __future__ import annotations

import copy
import gc
import json
import logging
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from hf_families import cache_argument, greedy, left_padded, tiny_model, tokens  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import DynamicCache, GenerationMixin, GPT2Config, LlamaConfig, StaticCache  # noqa: E402

import tinyserve_ops  # noqa: E402
from tinyserve_ops.hf import PackedBatch, TinyServeCache, new_paged_cache  # noqa: E402

ALL = {"token_budget": 1024, "dense_layers": 0}


@pytest.fixture
def llama() -> Any:
    return tiny_model("llama")


@pytest.fixture
def gpt2() -> Any:
    return tiny_model("gpt2")


def forward(model: Any, ids: torch.Tensor, cache: Any = None, mask: torch.Tensor | None = None, **keywords: Any) -> torch.Tensor:
    """Logits; position ids count real tokens."""
    if mask is not None and mask.dim() == 2 and "position_ids" not in keywords:
        keywords["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.size(1) :]
    if cache is not None:
        keywords[cache_argument(model)] = cache
    with torch.no_grad():
        return model(ids, attention_mask=mask, **keywords).logits


# Causality and padding ---------------------------------------------------------------------------------------------------------


def test_a_later_token_never_changes_earlier_logits_and_padded_rows_equal_solo_rows(llama: Any) -> None:
    ids = tokens(1, 24)
    other = ids.clone()
    other[0, 20] = (other[0, 20] + 1) % 200 + 2
    with tinyserve_ops.enable(llama, **ALL) as handle:
        a, b = (forward(llama, x, handle.new_cache()) for x in (ids, other))
        assert torch.equal(a[:, :20], b[:, :20]) and not torch.equal(a[:, 20:], b[:, 20:])
        padded, mask = left_padded(tokens(2, 24), [10, 0])
        both = forward(llama, padded, handle.new_cache(), mask)
        for row, start in ((0, 10), (1, 0)):
            solo = forward(llama, padded[row : row + 1, start:], handle.new_cache())
            torch.testing.assert_close(both[row, start:], solo[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["2d", "bool 4d", "additive 4d"])
def test_pages_of_pure_padding_are_neither_selected_nor_counted_in_the_budget(llama: Any, kind: str) -> None:
    ids, mask = left_padded(tokens(2, 40), [0, 33])  # row 1: two whole pages of padding
    sparse = {"keep_ratio": 0.3, "dense_layers": 0, "num_sink_pages": 0, "num_recent_pages": 1, "page_size": 4}

    def given(mask: torch.Tensor, queries: int) -> torch.Tensor:
        if kind == "2d":
            return mask
        length = mask.size(1)
        causal = torch.ones(length, length, dtype=torch.bool).tril()[-queries:]
        visible = causal[None, None] & mask.bool()[:, None, None]
        if kind == "bool 4d":
            return visible
        return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)

    steps = tokens(2, 6, seed=5)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with tinyserve_ops.enable(llama, record_selection=True, **sparse) as handle:
        cache, solo = handle.new_cache(), handle.new_cache()
        forward(llama, ids, cache, given(mask, 40), position_ids=positions)
        assert cache.stored_lengths() == [40, 7]
        forward(llama, ids[1:, 33:], solo)
        for i in range(6):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
            positions = positions[:, -1:] + 1
            got = forward(llama, steps[:, i : i + 1], cache, given(mask, 1), position_ids=positions)
            alone = forward(llama, steps[1:, i : i + 1], solo, position_ids=positions[1:])
            torch.testing.assert_close(got[1], alone[0], atol=1e-5, rtol=1e-5)
        for a, b in zip(cache.kv.selection_history(), solo.kv.selection_history(), strict=True):
            assert a.lengths[1] == b.lengths[0]
            for layer, selected in a.selected_pages.items():
                row, alone_row = selected[1], b.selected_pages[layer][0]
                assert row[row >= 0].tolist() == alone_row[alone_row >= 0].tolist()
                assert row.max() <= a.lengths[1] // 4
        assert cache.stats().selection_engaged


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("hidden", ["False", "minimum", "infinity"])
def test_a_query_that_may_see_nothing_gives_zeros_and_spreads_no_nan(dtype: torch.dtype, hidden: str) -> None:
    model = tiny_model("llama", dtype=dtype)
    ids, mask = left_padded(tokens(2, 24), [9, 0])
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    visible = causal[None, None] & mask.bool()[:, None, None]
    value = -float("inf") if hidden == "infinity" else torch.finfo(dtype).min
    given = visible if hidden == "False" else torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, value)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with tinyserve_ops.enable(model, **ALL) as handle:
        logits = forward(model, ids, handle.new_cache(), given, position_ids=positions)
        same = forward(model, ids, handle.new_cache(), mask)
        solo = forward(model, ids[:1, 9:], handle.new_cache())
    assert torch.isfinite(logits).all() and torch.equal(logits, same)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 0.15}[dtype]
    torch.testing.assert_close(logits[0, 9:], solo[0], atol=tolerance, rtol=tolerance)


def test_a_left_padded_gpt2_generates_what_each_row_generates_alone(gpt2: Any) -> None:
    ids, mask = left_padded(tokens(2, 9), [4, 0])
    with tinyserve_ops.enable(gpt2, **ALL) as handle:
        got = greedy(gpt2, ids, mask, new=8)
        assert torch.equal(got[0, 4:], greedy(gpt2, ids[:1, 4:], new=8)[0])
        assert torch.equal(got[1], greedy(gpt2, ids[1:], new=8)[0])
        kv = new_paged_cache(gpt2, handle.config, max_tokens=64)
        batch, sequences, new = PackedBatch(gpt2, kv), [kv.new_sequence() for _ in range(2)], [ids[0, 4:].tolist(), ids[1].tolist()]
        packed: list[list[int]] = [[], []]
        with torch.no_grad():
            for _ in range(8):
                logits = batch.last_logits(gpt2(**batch.inputs(zip(sequences, new, strict=True))))
                new = [[token] for token in logits.argmax(-1).tolist()]
                packed = [row + token for row, token in zip(packed, new, strict=True)]
        assert packed == got[:, 9:].tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padding_of_a_batch_of_one_is_masked(family: str) -> None:
    model = tiny_model(family)
    ids, mask = left_padded(tokens(1, 14), [5])
    with tinyserve_ops.enable(model, **ALL) as handle:
        padded = forward(model, ids, handle.new_cache(), mask)
        solo = forward(model, ids[:, 5:], handle.new_cache())
    torch.testing.assert_close(padded[:, -1], solo[:, -1], atol=1e-5, rtol=1e-5)


def test_right_and_interior_padding_leave_the_real_tokens_as_they_are(llama: Any) -> None:
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, 5:8] = 0
    mask[1, 15:] = 0
    with tinyserve_ops.enable(llama, **ALL) as handle:
        cache = handle.new_cache()
        logits = forward(llama, ids, cache, mask)
        for row in range(2):
            real = mask[row].bool()
            solo = forward(llama, ids[row : row + 1, real], handle.new_cache())
            torch.testing.assert_close(logits[row, real], solo[0], atol=1e-5, rtol=1e-5)
        k, v = cache.dense(0)
        assert k.shape == (2, 2, 20, 16) and not k[0, :, 5:8].any() and not v[1, :, 15:].any()
        assert k[0, :, 8].any() and cache.get_seq_length() == 20


def test_a_mask_that_contradicts_what_is_stored_is_refused_and_changes_nothing(llama: Any) -> None:
    ids, mask = left_padded(tokens(2, 12), [3, 0])
    one, more = tokens(2, 1, seed=5), torch.ones(2, 1, dtype=mask.dtype)
    with tinyserve_ops.enable(llama, **ALL) as handle:
        cache = handle.new_cache()
        forward(llama, ids, cache, mask)
        shown, hidden = mask.clone(), mask.clone()
        shown[0, 1], hidden[1, 4] = 1, 0
        for wrong in (shown, hidden, torch.ones_like(mask)):
            with pytest.raises(ValueError, match="attention_mask.*already stored"):
                forward(llama, one, cache, torch.cat([wrong, more], dim=1))
        with pytest.raises(ValueError, match="attention_mask.*None"):
            forward(llama, one, cache)
        with pytest.raises(ValueError, match=r"attention_mask: expected \[2, 13\]"):
            forward(llama, one, cache, torch.ones(2, 9, dtype=torch.long), position_ids=torch.tensor([[9], [12]]))
        assert cache.get_seq_length() == 12 and cache.stored_lengths() == [9, 12]
        forward(llama, one, cache, torch.cat([mask, more], dim=1))
        assert cache.stored_lengths() == [10, 13]


def test_a_4d_mask_that_is_more_than_causal_is_refused(llama: Any) -> None:
    ids = tokens(1, 8)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    tree = causal.clone()
    tree[..., 6, 5] = False
    bias = torch.zeros(1, 1, 8, 8).masked_fill(~causal, -torch.inf)
    bias[..., 3, 1] = -0.5
    with tinyserve_ops.enable(llama, **ALL) as handle:
        with pytest.raises(ValueError, match="attention_mask.*pattern"):
            forward(llama, ids, handle.new_cache(), tree, position_ids=torch.arange(8)[None])
        with pytest.raises(ValueError, match="attention_mask.*bias"):
            forward(llama, ids, handle.new_cache(), bias, position_ids=torch.arange(8)[None])


class _LargestMask(TorchDispatchMode):
    """Remembers the largest tensor of two equal last dimensions of at least `side` made inside it."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side, self.square, self.largest = side, None, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                if tensor.dim() >= 2 and min(tensor.shape[-2:]) >= self.side:
                    self.square = (str(func), tuple(tensor.shape))
        return out


@pytest.mark.parametrize("pads", [0, 5])
def test_a_long_prefill_makes_no_length_by_length_tensor(pads: int) -> None:
    length = 1500
    model = tiny_model("llama", max_position_embeddings=2048)
    ids, mask = left_padded(tokens(1, length), [pads])
    with tinyserve_ops.enable(model, **ALL) as handle, _LargestMask(length - pads) as seen:
        logits = forward(model, ids, handle.new_cache(), mask, logits_to_keep=1)
    assert logits.shape[1] == 1
    assert seen.square is None
    assert seen.largest < length * length / 4


def test_the_mask_function_never_makes_a_four_dimensional_mask_for_our_cache(llama: Any) -> None:
    from transformers.masking_utils import create_causal_mask

    length = 32768
    mask = torch.ones(1, length, dtype=torch.long)
    mask[0, :5] = 0
    with tinyserve_ops.enable(llama, **ALL) as handle:
        name = cache_argument(llama)
        renamed = "inputs_embeds" if transformers.__version__.startswith("5") else "input_embeds"
        keywords = {renamed: torch.zeros(1, length, 1), "attention_mask": mask, name: handle.new_cache()}
        if not transformers.__version__.startswith("5"):
            keywords["cache_position"] = torch.arange(length)
        made = create_causal_mask(config=llama.config, **keywords)
    assert made.shape == (1, length)


# The cache --------------------------------------------------------------------------------------------------------------------


def test_crop_accepts_every_number_and_the_next_logits_are_those_of_a_fresh_prefill(llama: Any) -> None:
    ids = tokens(1, 33)
    more = tokens(1, 20, seed=6)
    zero_empties = transformers.__version__.startswith("4.")  # there 0 is a length, later a number of tokens to remove
    with tinyserve_ops.enable(llama, **ALL) as handle:
        for crop, left in ((0, 0 if zero_empties else 33), (-50, 0), (33, 33), (15, 15), (16, 16), (17, 17), (-1, 32), (99, 33)):
            cache, fresh = handle.new_cache(), handle.new_cache()
            forward(llama, ids, cache)
            cache.crop(crop)
            assert cache.get_seq_length() == left and cache.stored_lengths() == [left]
            assert len(cache.kv.page_ids(cache.sequences[0])) == -(-left // 16)
            cache.kv.check()
            if left:
                forward(llama, ids[:, :left], fresh)
            for i in range(0, 20, 5):  # refills the page that was reopened
                step = {"position_ids": torch.arange(left + i, left + i + 5)[None]}
                a, b = (forward(llama, more[:, i : i + 5], c, **step) for c in (cache, fresh))
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
            for layer in range(2):
                full = cache.get_seq_length() // 16
                summaries = []
                for c in (cache, fresh):
                    pool = c.kv.pool.layers[layer]
                    summaries.append(pool.page_summary[c.kv.page_ids(c.sequences[0])[:full].long()])
                assert _close_codes(*summaries)


def _close_codes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal int8 codes up to one step, as keys that differ by rounding give."""
    difference = (a[..., 16:].view(torch.int8).int() - b[..., 16:].view(torch.int8).int()).abs()
    return int(difference.max()) <= 1


def test_crop_to_names_a_length_that_is_out_of_range(llama: Any) -> None:
    with tinyserve_ops.enable(llama, **ALL) as handle:
        cache = handle.new_cache()
        forward(llama, tokens(1, 5), cache)
        for bad in (-1, 6):
            with pytest.raises(ValueError, match="length: expected 0 to 5"):
                cache.crop_to(bad)
        cache.crop_to(0)
        assert cache.get_seq_length() == 0


def test_reset_forgets_everything_and_accepts_another_batch_size(llama: Any) -> None:
    with tinyserve_ops.enable(llama, **ALL) as handle:
        cache = handle.new_cache()
        forward(llama, tokens(2, 6), cache)
        allocator = cache.kv.pool.groups[0].allocator
        cache.reset()
        assert cache.get_seq_length() == 0 and allocator.num_free == allocator.num_pages
        logits = forward(llama, tokens(1, 3), cache)
        assert cache.get_seq_length() == 3 and cache.batch_size == 1
        torch.testing.assert_close(logits, forward(llama, tokens(1, 3), handle.new_cache()))


def test_beam_search_gives_the_unpatched_scores_and_gives_its_pages_back(llama: Any) -> None:
    reference = tiny_model("llama")
    ids = tokens(2, 20)
    options = {"num_beams": 3, "output_scores": True, "return_dict_in_generate": True}
    expected = greedy(reference, ids, None, 12, **options)
    with tinyserve_ops.enable(llama, **ALL) as handle:
        cache = handle.new_cache()
        got = greedy(llama, ids, None, 12, **options, **{cache_argument(llama): cache})
        assert torch.equal(got.sequences, expected.sequences)
        torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4)
        cache.kv.check()
        allocator = cache.kv.pool.groups[0].allocator
        assert allocator.num_free + allocator.num_cached + allocator.num_used == allocator.num_pages
        assert len(cache.kv.sequences) == 6
        cache.reset()
        assert allocator.num_used == 0


def test_reordering_there_and_back_gives_the_same_bytes_and_an_identity_costs_nothing(llama: Any) -> None:
    with tinyserve_ops.enable(llama, **ALL) as handle:
        cache = handle.new_cache()
        ids, mask = left_padded(tokens(3, 21), [4, 0, 9])
        forward(llama, ids, cache, mask)
        before = [t.clone() for pair in cache for t in pair]
        handles = cache.sequences
        cache.reorder_cache(torch.tensor([0, 1, 2]))
        assert cache.sequences == handles
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        assert sorted(cache.sequences) == sorted(handles)  # a permutation copies nothing
        assert cache.stored_lengths() == [12, 17, 21]
        cache.reorder_cache(torch.tensor([1, 2, 0]))
        assert all(torch.equal(a, b) for a, b in zip(before, [t for pair in cache for t in pair], strict=True))
        cache.batch_repeat_interleave(2)
        assert cache.stored_lengths() == [17, 17, 21, 21, 12, 12]
        cache.batch_select_indices(torch.tensor([5, 0]))
        assert cache.stored_lengths() == [12, 17] and torch.equal(cache.dense(0)[0][1], before[0][0])
        with pytest.raises(ValueError, match="row index"):
            cache.batch_select_indices(torch.tensor([2]))
        cache.kv.check()


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_copies_of_a_cache_go_their_own_ways(llama: Any, grad_mode: Any) -> None:
    prompt = tokens(1, 20)  # page 1 is half full
    with tinyserve_ops.enable(llama, **ALL) as handle, grad_mode():
        first = handle.new_cache()
        forward(llama, prompt, first)
        second = copy.deepcopy(first)
        allocator = first.kv.pool.groups[0].allocator
        assert allocator.num_used == 2  # shared
        turns = [(first, tokens(1, 8, seed=1)), (second, tokens(1, 8, seed=2))]
        got: list[list[torch.Tensor]] = [[], []]
        for i in range(8):
            for n, (cache, new) in enumerate(turns):
                got[n].append(forward(llama, new[:, i : i + 1], cache, position_ids=torch.tensor([[20 + i]])))
        for n, (cache, new) in enumerate(turns):
            whole = forward(llama, torch.cat([prompt, new], dim=1), handle.new_cache())
            torch.testing.assert_close(torch.cat(got[n], 1), whole[:, 20:], atol=1e-5, rtol=1e-5)
            cache.kv.check()
        assert allocator.num_used == 3  # only the half-full page was copied
        del second, cache, turns
        gc.collect()
        assert allocator.num_used == 2
        first.reset()
        assert allocator.num_used == 0


def test_a_forward_that_fails_leaves_the_cache_at_its_committed_length(llama: Any) -> None:
    ids = tokens(1, 20)

    def fail(*_: Any) -> None:
        raise RuntimeError("boom")

    with tinyserve_ops.enable(llama, **ALL) as handle:
        cache = handle.new_cache()
        forward(llama, ids, cache)
        hook = llama.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="boom"):
            forward(llama, tokens(1, 7, seed=5), cache)
        hook.remove()
        assert cache.get_seq_length() == 20 and cache.stored_lengths() == [20]
        step = {"position_ids": torch.tensor([[20]])}
        got = forward(llama, tokens(1, 1, seed=6), cache, **step)
        whole = forward(llama, torch.cat([ids, tokens(1, 1, seed=6)], 1), handle.new_cache())
        torch.testing.assert_close(got[:, 0], whole[:, -1], atol=1e-5, rtol=1e-5)
        cache.kv.check()


def test_a_pool_that_runs_out_raises_and_the_cache_goes_on_from_where_it_was(llama: Any) -> None:
    with tinyserve_ops.enable(llama, max_kv_bytes=2 * 2 * 3 * 2 * 16 * 16 * 4, **ALL) as handle:  # nearly three pages
        cache = handle.new_cache(max_tokens=32)
        forward(llama, tokens(1, 20), cache)
        with pytest.raises(tinyserve_ops.OutOfPagesError):
            forward(llama, tokens(1, 60, seed=5), cache)
        assert cache.stored_lengths() == [20]
        forward(llama, tokens(1, 3, seed=5), cache)
        assert cache.stored_lengths() == [23]


def test_a_cache_of_another_model_or_batch_is_refused(llama: Any) -> None:
    other = tiny_model("llama", seed=1)
    with tinyserve_ops.enable(llama, **ALL) as handle, tinyserve_ops.enable(other, **ALL):
        cache = handle.new_cache()
        forward(llama, tokens(2, 6), cache)
        with pytest.raises(ValueError, match="cache: expected the model it was made for"):
            forward(other, tokens(2, 2), cache)
        with pytest.raises(ValueError, match="batch size: expected 2"):
            forward(llama, tokens(3, 2), cache)
        assert cache.stored_lengths() == [6, 6]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_our_cache_under_another_attention_still_gives_right_tokens(llama: Any, attention: str) -> None:
    ids = tokens(2, 30)
    expected = greedy(llama, ids)
    with tinyserve_ops.enable(llama, **ALL) as handle:
        cache = {cache_argument(llama): handle.new_cache()}
        first = greedy(llama, ids, new=8, **cache)
        llama.set_attn_implementation(attention)
        second = greedy(llama, first, new=8, **cache)
        llama.set_attn_implementation("tinyserve")
        third = greedy(llama, second, new=8, **cache)
    assert torch.equal(third, expected)


def test_other_caches_beside_ours_stay_right_and_one_warning_says_that_they_are_dense(llama: Any, caplog: Any) -> None:
    reference, ids = tiny_model("llama"), tokens(1, 20)
    name = cache_argument(llama)
    with tinyserve_ops.enable(llama, **ALL) as handle, caplog.at_level(logging.WARNING, logger="tinyserve_ops"):
        ours = handle.new_cache()
        expected = greedy(llama, ids, **{name: ours})
        assert not caplog.records
        for _ in range(2):
            assert torch.equal(greedy(llama, ids, **{name: DynamicCache(config=llama.config)}), expected)
        static = StaticCache(config=llama.config, max_cache_len=64)
        assert torch.equal(greedy(llama, ids, **{name: static}), expected)
        assert [r.message for r in caplog.records if "attention is dense" in r.message] == [caplog.records[0].message]
    assert torch.equal(greedy(reference, ids), expected)


def test_stats_outlive_the_cache_that_generate_made_and_count_what_was_left_out(llama: Any) -> None:
    with tinyserve_ops.enable(llama, token_budget=48, num_recent_pages=1, dense_layers=1) as handle:
        with pytest.raises(RuntimeError, match="expected a cache"):
            handle.stats()
        greedy(llama, tokens(1, 100), new=5)
        stats = handle.stats()
    assert stats.sparse_steps == stats.dense_steps == 4 and stats.selection_engaged
    assert stats.pages_read == 4 * 2 * 3 and stats.prefill_tokens == 100


# Switching on and off ----------------------------------------------------------------------------------------------------------


def test_disabling_restores_the_model_and_transformers_also_when_the_body_raises(llama: Any, tmp_path: Path) -> None:
    ids = tokens(1, 12)
    before, method = forward(llama, ids), GenerationMixin._prepare_cache_for_generation
    with pytest.raises(RuntimeError, match="body"), tinyserve_ops.enable(llama, **ALL):
        assert llama.config._attn_implementation == "tinyserve"
        assert GenerationMixin._prepare_cache_for_generation is not method
        llama.save_pretrained(tmp_path)
        raise RuntimeError("body")
    assert llama.config._attn_implementation == "sdpa" and not llama._forward_pre_hooks
    assert GenerationMixin._prepare_cache_for_generation is method
    assert torch.equal(forward(llama, ids), before)
    assert "tinyserve" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(forward(reloaded, ids), before)


def test_the_previous_attention_comes_back_even_when_it_was_not_sdpa(llama: Any) -> None:
    llama.set_attn_implementation("eager")
    tinyserve_ops.enable(llama)
    tinyserve_ops.disable(llama)
    assert llama.config._attn_implementation == "eager"


def test_enabling_twice_is_an_error_that_names_the_first_and_disabling_twice_is_one_too(llama: Any) -> None:
    handle = tinyserve_ops.enable(llama, token_budget=512)
    with pytest.raises(ValueError, match=r"not enabled, got a LlamaForCausalLM enabled with SparseConfig\(.*token_budget=512"):
        tinyserve_ops.enable(llama)
    assert handle.enabled and llama.config._attn_implementation == "tinyserve"
    handle.disable()
    handle.disable()
    assert not handle.enabled
    with pytest.raises(ValueError, match="not enabled"):
        tinyserve_ops.disable(llama)


def test_the_hook_lives_as_long_as_the_last_enabled_model(llama: Any, gpt2: Any) -> None:
    method = GenerationMixin._prepare_cache_for_generation
    first, second = tinyserve_ops.enable(llama), tinyserve_ops.enable(gpt2)
    plain = tiny_model("qwen2")
    expected = greedy(plain, tokens(1, 9), new=4, return_dict_in_generate=True)
    assert isinstance(getattr(expected, cache_argument(plain)), DynamicCache)  # inert for other models
    first.disable()
    assert GenerationMixin._prepare_cache_for_generation is not method
    out = greedy(gpt2, tokens(1, 9), new=4, return_dict_in_generate=True)
    assert isinstance(getattr(out, cache_argument(gpt2)), TinyServeCache)
    second.disable()
    assert GenerationMixin._prepare_cache_for_generation is method
    model = tiny_model("llama")
    tinyserve_ops.enable(model)
    del model
    gc.collect()
    assert GenerationMixin._prepare_cache_for_generation is method


def test_without_a_handle_the_registered_name_means_sdpa(llama: Any) -> None:
    ids, mask = left_padded(tokens(2, 20), [6, 0])
    expected = greedy(llama, ids, mask)
    llama.set_attn_implementation("tinyserve")
    assert torch.equal(greedy(llama, ids, mask), expected)


def test_training_goes_through_sdpa_with_the_same_gradients(llama: Any) -> None:
    ids = tokens(2, 10)

    def gradient() -> torch.Tensor:
        llama.zero_grad()
        llama(ids, labels=ids, use_cache=False).loss.backward()
        return llama.model.layers[0].self_attn.q_proj.weight.grad.clone()

    expected = gradient()
    with tinyserve_ops.enable(llama, **ALL) as handle:
        assert torch.equal(gradient(), expected)
        with pytest.raises(ValueError, match="query: expected no gradient"):
            llama(ids, **{cache_argument(llama): handle.new_cache()})


def test_options_come_as_a_config_or_as_keywords_but_not_both(llama: Any) -> None:
    config = tinyserve_ops.SparseConfig(token_budget=256, scorer="mean")
    with tinyserve_ops.enable(llama, config) as handle:
        assert handle.config is config
    with pytest.raises(TypeError, match="config.*both"):
        tinyserve_ops.enable(llama, config, page_size=8)
    with pytest.raises(TypeError, match="config: expected a SparseConfig"):
        tinyserve_ops.enable(llama, {"page_size": 8})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model: expected a transformers"):
        tinyserve_ops.enable(torch.nn.Linear(2, 2))
    assert llama.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scorer", ["bounds", "bounds_full", "mean", "mean_std", "bounds_mean"])
def test_every_scorer_and_kv_dtype_runs_end_to_end(llama: Any, scorer: str, kv_dtype: str) -> None:
    with tinyserve_ops.enable(llama, token_budget=64, page_size=8, dense_layers=0, scorer=scorer, kv_dtype=kv_dtype) as handle:
        cache = handle.new_cache()
        greedy(llama, tokens(2, 90), new=4, **{cache_argument(llama): cache})
        assert cache.kv.dtype == getattr(torch, kv_dtype) and cache.stats().selection_engaged


# Refusals ----------------------------------------------------------------------------------------------------------------------


def from_config(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


_SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def test_logit_soft_capping_is_refused_by_name() -> None:
    kw = {**_SMALL, "num_key_value_heads": 2, "head_dim": 16, "attn_logit_softcapping": 1.0, "sliding_window": 8}
    with pytest.raises(ValueError, match=r"attn_logit_softcapping: .* got 1\.0"):
        tinyserve_ops.enable(from_config(transformers.Gemma2Config(**kw)))


def test_attention_sink_parameters_are_refused_by_name() -> None:
    kw = {**_SMALL, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    with pytest.raises(ValueError, match="sinks: "):
        tinyserve_ops.enable(from_config(transformers.GptOssConfig(**kw)))


@pytest.mark.parametrize("flags", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}], ids=str)
def test_scale_flags_of_gpt2_are_honoured(flags: dict[str, bool]) -> None:
    plain, model = tiny_model("gpt2"), tiny_model("gpt2", **flags)
    model.set_attn_implementation("eager")  # the definition of the flags
    ids = tokens(1, 20)
    expected = forward(model, ids)
    assert (expected - forward(plain, ids)).abs().max() > 1e-3
    with tinyserve_ops.enable(model, **ALL) as handle:
        cache = handle.new_cache()
        got = forward(model, ids[:, :19], cache)
        step = forward(model, ids[:, 19:], cache, position_ids=torch.tensor([[19]]))
        torch.testing.assert_close(torch.cat([got, step], dim=1), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(forward(model, ids), expected, atol=1e-4, rtol=1e-4)  # also without a cache


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_prompt_past_the_positions_is_refused_by_name(family: str) -> None:
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    model = tiny_model(family, **{name: 64})
    with tinyserve_ops.enable(model, **ALL) as handle:
        with pytest.raises(ValueError, match=r"max_position_embeddings: .* 64 tokens.* got 65"):
            greedy(model, tokens(1, 65), new=1)
        with pytest.raises(ValueError, match="max_position_embeddings"):
            forward(model, tokens(1, 65))
        cache = handle.new_cache()
        forward(model, tokens(1, 60), cache)
        with pytest.raises(ValueError, match=r"max_position_embeddings.* got 66"):
            forward(model, tokens(1, 6), cache, position_ids=torch.arange(60, 66)[None])
        assert cache.get_seq_length() == 60
        kv = new_paged_cache(model, handle.config)
        with pytest.raises(ValueError, match="max_position_embeddings"):
            PackedBatch(model, kv).inputs([(kv.new_sequence(), tokens(1, 65)[0].tolist())])
        ids, mask = left_padded(tokens(1, 70), [10])  # 60 real tokens fit
        assert greedy(model, ids, mask, new=4).shape == (1, 74)


def test_a_model_spread_over_devices_is_refused_by_name(llama: Any) -> None:
    llama.hf_device_map = {"model.layers.0": "cuda:0", "model.layers.1": "cuda:1"}
    with pytest.raises(ValueError, match=r"hf_device_map: .*cuda:0.*cuda:1"):
        tinyserve_ops.enable(llama)
    llama.hf_device_map = {"": "cpu"}
    tinyserve_ops.enable(llama).disable()


def test_models_of_another_shape_are_refused_by_the_name_of_what_differs() -> None:
    t5 = transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    encoder_decoder = transformers.T5ForConditionalGeneration(t5)
    cross = from_config(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, add_cross_attention=True))
    odd_head = from_config(LlamaConfig(**{**_SMALL, "head_dim": 12}))
    latent = from_config(
        transformers.DeepseekV3Config(
            **_SMALL, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
            n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1,
        )
    )  # fmt: skip
    own_attention = from_config(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    for model, name in (
        (encoder_decoder, "is_encoder_decoder"),
        (cross, "add_cross_attention"),
        (odd_head, "head_dim.*got 12"),
        (latent, "kv_lora_rank"),
        (own_attention, "BloomForCausalLM"),
    ):
        with pytest.raises(ValueError, match=name):
            tinyserve_ops.enable(model)
        assert model.config._attn_implementation != "tinyserve"


def test_dropout_in_training_mode_is_refused_over_our_cache(gpt2: Any) -> None:
    gpt2.train()
    with tinyserve_ops.enable(gpt2, **ALL) as handle, pytest.raises(ValueError, match=r"dropout.*eval"):
        forward(gpt2, tokens(1, 5), handle.new_cache())


def test_a_packed_batch_refuses_what_it_cannot_mean(llama: Any) -> None:
    with tinyserve_ops.enable(llama, **ALL) as handle:
        kv = new_paged_cache(llama, handle.config, max_tokens=64)
        batch, seq = PackedBatch(llama, kv), kv.new_sequence()
        for rows in ([], [(seq, [])]):
            with pytest.raises(ValueError, match="rows: "):
                batch.inputs(rows)
        with pytest.raises(RuntimeError, match="inputs"):
            forward(llama, tokens(1, 3), batch)
        inputs = batch.inputs([(seq, [3, 4, 5])])
        with torch.no_grad():
            llama(**inputs)
            with pytest.raises(RuntimeError, match="before every forward"):
                llama(**inputs)
        assert kv.length(seq) == 3
    with pytest.raises(ValueError, match="attn_implementation"):
        llama(**batch.inputs([(seq, [6])]))
