"""Faults that attention replacements had elsewhere, tried on this one: causality, padding, masks, cache."""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from hf_families import cache_argument, forward, greedy, left_padded, tiny_model, tokens  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

import tinyserve_ops  # noqa: E402
from tinyserve_ops.hf import PackedBatch, new_paged_cache  # noqa: E402

ALL = {"token_budget": 1024, "dense_layers": 0}


@pytest.fixture
def llama() -> Any:
    return tiny_model("llama")


@pytest.fixture
def gpt2() -> Any:
    return tiny_model("gpt2")


# Causality and padding --------------------------------------------------------------------------------------


def test_a_later_token_never_changes_earlier_logits_and_padded_rows_equal_solo_rows(llama: Any) -> None:
    ids = tokens(1, 24)
    other = ids.clone()
    other[0, 20] = (other[0, 20] + 1) % 200 + 2
    with tinyserve_ops.enable(llama, **ALL) as handle:
        a, b = (forward(llama, x, handle.new_cache()) for x in (ids, other))
        assert torch.equal(a[:, :20], b[:, :20])
        assert not torch.equal(a[:, 20:], b[:, 20:])
        padded, mask = left_padded(tokens(2, 24), [10, 0])
        both = forward(llama, padded, handle.new_cache(), mask)
        for row, start in ((0, 10), (1, 0)):
            solo = forward(llama, padded[row : row + 1, start:], handle.new_cache())
            torch.testing.assert_close(both[row, start:], solo[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["2d", "bool 4d", "additive 4d"])
def test_pages_of_pure_padding_are_neither_selected_nor_counted_in_the_budget(llama: Any, kind: str) -> None:
    ids, mask = left_padded(tokens(2, 40), [0, 33])  # row 1: two whole pages of padding
    sparse = {
        "keep_ratio": 0.3,
        "dense_layers": 0,
        "num_sink_pages": 0,
        "num_recent_pages": 1,
        "page_size": 4,
    }

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


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize("hidden", ["False", "minimum", "infinity"])
def test_a_query_that_may_see_nothing_gives_zeros_and_spreads_no_nan(dtype: torch.dtype, hidden: str) -> None:
    model = tiny_model("llama", dtype=dtype)
    ids, mask = left_padded(tokens(2, 24), [9, 0])
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    visible = causal[None, None] & mask.bool()[:, None, None]
    value = -float("inf") if hidden == "infinity" else torch.finfo(dtype).min
    given = (
        visible if hidden == "False" else torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, value)
    )
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with tinyserve_ops.enable(model, **ALL) as handle:
        logits = forward(model, ids, handle.new_cache(), given, position_ids=positions)
        same = forward(model, ids, handle.new_cache(), mask)
        solo = forward(model, ids[:1, 9:], handle.new_cache())
    assert torch.isfinite(logits).all()
    assert torch.equal(logits, same)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 0.15}[dtype]
    torch.testing.assert_close(logits[0, 9:], solo[0], atol=tolerance, rtol=tolerance)


def test_a_left_padded_gpt2_generates_what_each_row_generates_alone(gpt2: Any) -> None:
    ids, mask = left_padded(tokens(2, 9), [4, 0])
    with tinyserve_ops.enable(gpt2, **ALL) as handle:
        got = greedy(gpt2, ids, mask, new=8)
        assert torch.equal(got[0, 4:], greedy(gpt2, ids[:1, 4:], new=8)[0])
        assert torch.equal(got[1], greedy(gpt2, ids[1:], new=8)[0])
        kv = new_paged_cache(gpt2, handle.config, max_tokens=64)
        batch, sequences, new = (
            PackedBatch(gpt2, kv),
            [kv.new_sequence() for _ in range(2)],
            [ids[0, 4:].tolist(), ids[1].tolist()],
        )
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


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_a_padded_forward_without_position_ids_is_what_the_unpatched_model_makes_of_it(family: str) -> None:
    reference, model = tiny_model(family), tiny_model(family)
    ids, mask = left_padded(tokens(2, 24), [9, 0])
    with torch.no_grad(), tinyserve_ops.enable(model, **ALL) as handle:
        expected = reference(ids, attention_mask=mask).logits
        got = model(ids, attention_mask=mask, **{cache_argument(model): handle.new_cache()}).logits
    real = mask.bool()
    torch.testing.assert_close(got[real], expected[real], atol=2e-4, rtol=1e-3)


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
        assert k.shape == (2, 2, 20, 16)
        assert not k[0, :, 5:8].any()
        assert not v[1, :, 15:].any()
        assert k[0, :, 8].any()
        assert cache.get_seq_length() == 20


def test_a_mask_that_contradicts_what_is_stored_is_refused_and_changes_nothing(llama: Any) -> None:
    ids, mask = left_padded(tokens(2, 12), [3, 0])
    one, more = tokens(2, 1, seed=5), torch.ones(2, 1, dtype=mask.dtype)
    with tinyserve_ops.enable(llama, **ALL) as handle:
        cache = handle.new_cache()
        forward(llama, ids, cache, mask)
        shown, hidden = mask.clone(), mask.clone()
        shown[0, 1], hidden[1, 4] = 1, 0
        for wrong in (shown, hidden, torch.ones_like(mask)):
            with pytest.raises(ValueError, match=r"attention_mask.*already stored"):
                forward(llama, one, cache, torch.cat([wrong, more], dim=1))
        with pytest.raises(ValueError, match=r"attention_mask.*None"):
            forward(llama, one, cache)
        with pytest.raises(ValueError, match=r"attention_mask: expected \[2, 13\]"):
            forward(
                llama, one, cache, torch.ones(2, 9, dtype=torch.long), position_ids=torch.tensor([[9], [12]])
            )
        assert cache.get_seq_length() == 12
        assert cache.stored_lengths() == [9, 12]
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
        with pytest.raises(ValueError, match=r"attention_mask.*pattern"):
            forward(llama, ids, handle.new_cache(), tree, position_ids=torch.arange(8)[None])
        with pytest.raises(ValueError, match=r"attention_mask.*bias"):
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


# The cache --------------------------------------------------------------------------------------------------


def test_crop_accepts_every_number_and_the_next_logits_are_those_of_a_fresh_prefill(llama: Any) -> None:
    ids = tokens(1, 33)
    more = tokens(1, 20, seed=6)
    zero_empties = transformers.__version__.startswith(
        "4."
    )  # there 0 is a length, later a number of tokens to remove
    with tinyserve_ops.enable(llama, **ALL) as handle:
        for crop, left in (
            (0, 0 if zero_empties else 33),
            (-50, 0),
            (33, 33),
            (15, 15),
            (16, 16),
            (17, 17),
            (-1, 32),
            (99, 33),
        ):
            cache, fresh = handle.new_cache(), handle.new_cache()
            forward(llama, ids, cache)
            cache.crop(crop)
            assert cache.get_seq_length() == left
            assert cache.stored_lengths() == [left]
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
        assert cache.get_seq_length() == 0
        assert allocator.num_free == allocator.num_pages
        logits = forward(llama, tokens(1, 3), cache)
        assert cache.get_seq_length() == 3
        assert cache.batch_size == 1
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
        assert all(
            torch.equal(a, b) for a, b in zip(before, [t for pair in cache for t in pair], strict=True)
        )
        cache.batch_repeat_interleave(2)
        assert cache.stored_lengths() == [17, 17, 21, 21, 12, 12]
        cache.batch_select_indices(torch.tensor([5, 0]))
        assert cache.stored_lengths() == [12, 17]
        assert torch.equal(cache.dense(0)[0][1], before[0][0])
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
        assert cache.get_seq_length() == 20
        assert cache.stored_lengths() == [20]
        step = {"position_ids": torch.tensor([[20]])}
        got = forward(llama, tokens(1, 1, seed=6), cache, **step)
        whole = forward(llama, torch.cat([ids, tokens(1, 1, seed=6)], 1), handle.new_cache())
        torch.testing.assert_close(got[:, 0], whole[:, -1], atol=1e-5, rtol=1e-5)
        cache.kv.check()


def test_a_pool_that_runs_out_raises_and_the_cache_goes_on_from_where_it_was(llama: Any) -> None:
    with tinyserve_ops.enable(
        llama, max_kv_bytes=2 * 2 * 3 * 2 * 16 * 16 * 4, **ALL
    ) as handle:  # nearly three pages
        cache = handle.new_cache(max_tokens=32)
        forward(llama, tokens(1, 20), cache)
        with pytest.raises(tinyserve_ops.OutOfPagesError):
            forward(llama, tokens(1, 60, seed=5), cache)
        assert cache.stored_lengths() == [20]
        forward(llama, tokens(1, 3, seed=5), cache)
        assert cache.stored_lengths() == [23]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_pool_that_runs_out_within_generate_leaves_the_tokens_that_fit(llama: Any, num_beams: int) -> None:
    page_bytes = tinyserve_ops.estimate_memory(llama, 16)
    page_bytes = page_bytes.kv_bytes + page_bytes.summary_bytes
    num_pages, prompt = 2 * num_beams, tokens(1, 20)
    expected = greedy(llama, prompt, new=12, num_beams=num_beams)
    with tinyserve_ops.enable(llama, max_kv_bytes=num_pages * page_bytes, **ALL) as handle:
        cache = handle.new_cache(max_tokens=16)
        with pytest.raises(tinyserve_ops.OutOfPagesError, match="max_kv_bytes") as caught:
            greedy(llama, prompt, new=90, num_beams=num_beams, **{cache_argument(llama): cache})
        assert caught.value.num_pages_total == num_pages
        length = cache.get_seq_length()
        assert 20 < length < 100  # beams share pages, so how far they get depends on them
        assert cache.stored_lengths() == [length] * num_beams
        assert [cache.kv.length(seq) for seq in cache.sequences] == [length] * num_beams
        cache.kv.check()
        cache.reset()
        again = greedy(llama, prompt, new=5, **{cache_argument(llama): cache})
        if num_beams == 1:
            assert length == 32
            assert torch.equal(again, expected[:, :25])
        with pytest.raises(tinyserve_ops.OutOfPagesError):  # also over the cache that generate makes
            greedy(llama, prompt, new=90, num_beams=num_beams)


def test_a_cache_in_a_model_that_is_not_enabled_is_refused_and_keeps_its_tokens(llama: Any) -> None:
    one = tokens(1, 1, seed=5)
    with tinyserve_ops.enable(llama, **ALL) as handle:
        cache = handle.new_cache()
        forward(llama, tokens(1, 6), cache)
        for family in ("llama", "gpt2"):
            with pytest.raises(ValueError, match="cache: expected the enabled model"):
                forward(tiny_model(family), one, cache)
            assert cache.stored_lengths() == [6]
        forward(llama, one, cache, position_ids=torch.tensor([[6]]))
        assert cache.stored_lengths() == [7]


def test_a_packed_batch_over_the_pages_of_another_model_is_refused(llama: Any, gpt2: Any) -> None:
    qwen2 = tiny_model("qwen2")  # of the same shape
    with tinyserve_ops.enable(llama, **ALL) as handle:
        with pytest.raises(ValueError, match="kv: expected 2 kv heads of 16, the model's, got 4 of 16"):
            PackedBatch(llama, new_paged_cache(gpt2, handle.config))
        with pytest.raises(ValueError, match=r"kv: expected one made for 'llama .*', got one for 'qwen2 .*'"):
            PackedBatch(llama, new_paged_cache(qwen2, handle.config))
        kv = new_paged_cache(llama, handle.config)
        batch, seq = PackedBatch(llama, kv), kv.new_sequence()
        inputs = batch.inputs([(seq, [3, 4])])
        with torch.no_grad(), pytest.raises(ValueError, match="cache: expected the enabled model"):
            tiny_model("llama")(**inputs)
        assert kv.length(seq) == 0


def test_an_export_goes_into_a_cache_of_the_same_kind_and_size_of_model_only(llama: Any) -> None:
    config = tinyserve_ops.SparseConfig(**ALL)
    with tinyserve_ops.enable(llama, config) as handle:
        cache = handle.new_cache()
        forward(llama, tokens(1, 20), cache)
        data = cache.kv.export(cache.sequences)
        assert new_paged_cache(llama, config).import_(data)
        for other in (tiny_model("qwen2"), tiny_model("llama", intermediate_size=64)):
            with pytest.raises(ValueError, match="fingerprint"):
                new_paged_cache(other, config).import_(data)


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


def test_other_caches_beside_ours_stay_right_and_one_warning_says_that_they_are_dense(
    llama: Any, caplog: Any
) -> None:
    reference, ids = tiny_model("llama"), tokens(1, 20)
    name = cache_argument(llama)
    with (
        tinyserve_ops.enable(llama, **ALL) as handle,
        caplog.at_level(logging.WARNING, logger="tinyserve_ops"),
    ):
        ours = handle.new_cache()
        expected = greedy(llama, ids, **{name: ours})
        assert not caplog.records
        for _ in range(2):
            assert torch.equal(greedy(llama, ids, **{name: DynamicCache(config=llama.config)}), expected)
        static = StaticCache(config=llama.config, max_cache_len=64)
        assert torch.equal(greedy(llama, ids, **{name: static}), expected)
        assert [r.message for r in caplog.records if "attention is dense" in r.message] == [
            caplog.records[0].message
        ]
    assert torch.equal(greedy(reference, ids), expected)


def test_stats_outlive_the_cache_that_generate_made_and_count_what_was_left_out(llama: Any) -> None:
    with tinyserve_ops.enable(llama, token_budget=48, num_recent_pages=1, dense_layers=1) as handle:
        with pytest.raises(RuntimeError, match="expected a cache"):
            handle.stats()
        greedy(llama, tokens(1, 100), new=5)
        stats = handle.stats()
    assert stats.sparse_steps == stats.dense_steps == 4
    assert stats.selection_engaged
    assert stats.pages_read == 4 * 2 * 3
    assert stats.prefill_tokens == 100
