"""Sequences that move between caches: shared over one pool, copied into pages of another format."""

from __future__ import annotations

import pytest
import torch
from dense_mirror import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, DenseMirror, new_cache

from tinyserve_ops import OutOfPagesError, PagedKVCache, SparseConfig

PAGE_8 = SparseConfig(page_size=8)


def summaries(cache: PagedKVCache, seq: int) -> list[torch.Tensor]:
    """The summaries of the full pages of a sequence, by layer."""
    num_full = cache.length(seq) // cache.config.page_size
    return [
        pool.page_summary[cache.page_ids(seq, cache.group_of_layer[layer])[:num_full].long()]
        for layer, pool in enumerate(cache.pool.layers)
    ]


@pytest.mark.parametrize("groups", [None, [[0, 2], [1]]])
@pytest.mark.parametrize(
    ("page_size", "scorer"), [(8, "bounds"), (8, "low_rank_3"), (16, "mean"), (7, "mean"), (1, "bounds")]
)
@pytest.mark.parametrize("length", [0, 5, 48, 61])
def test_a_copy_equals_a_sequence_that_was_appended_there(
    length: int, page_size: int, scorer: str, groups: list[list[int]] | None
) -> None:
    format_there = {"config": SparseConfig(page_size=page_size, scorer=scorer), "layer_groups": groups}
    here = DenseMirror(new_cache(config=PAGE_8))
    there = DenseMirror(new_cache(**format_there))
    source, appended = here.new(length), there.new(length)
    copied = there.cache.adopt(here.cache, source)
    there.tokens[copied] = list(here.tokens[source])
    there.assert_contents(copied)
    assert (there.cache.next_position(copied), there.cache.length(copied)) == (length, length)
    for ours, theirs in zip(summaries(there.cache, copied), summaries(there.cache, appended), strict=True):
        assert torch.equal(ours, theirs)
    there.step([(copied, 1), (appended, 1)])
    here.assert_contents(source)
    there.cache.check()


def test_a_copy_into_int8_pages_rounds_as_an_append_does() -> None:
    here, there = DenseMirror(new_cache(config=PAGE_8)), new_cache(config=PAGE_8, dtype=torch.int8)
    copied = there.adopt(here.cache, here.new(21))
    rounded = DenseMirror(there)
    rounded.tokens[copied] = here.tokens[next(iter(here.tokens))]
    rounded.assert_contents(copied)


def test_over_one_pool_pages_are_shared_under_another_budget() -> None:
    here = DenseMirror(new_cache(config=PAGE_8))
    source = here.new(30)
    narrow = PAGE_8.replace(token_budget=24, dense_layers=0)
    there = new_cache(config=narrow, pool=here.cache.pool)
    used = here.cache.pool.groups[0].allocator.num_used
    adopted = there.adopt(here.cache, source)
    assert here.cache.pool.groups[0].allocator.num_used == used
    assert there.page_ids(adopted).tolist() == here.cache.page_ids(source).tolist()
    mirror = DenseMirror(there)
    mirror.tokens[adopted] = list(here.tokens[source])
    mirror.step([(adopted, 1)], check=False)
    assert there.stats().pages_read == NUM_LAYERS * NUM_KV_HEADS * 3
    here.assert_contents(source)
    mirror.assert_contents(adopted)


def test_the_next_position_goes_along() -> None:
    here = DenseMirror(new_cache())
    source = here.new(5)
    here.cache.set_next_position(source, 9)
    there = new_cache(config=PAGE_8)
    assert there.next_position(there.adopt(here.cache, source)) == 9


def test_a_cache_of_another_shape_or_model_is_refused_by_name() -> None:
    here = DenseMirror(new_cache())
    source = here.new(5)
    other = PagedKVCache(NUM_LAYERS, 1, HEAD_DIM, max_tokens=64)
    with pytest.raises(ValueError, match="num_kv_heads: expected 1, as in this cache, got 2"):
        other.adopt(here.cache, source)
    with pytest.raises(ValueError, match="fingerprint: expected 'gpt2 a', as in this cache, got ''"):
        new_cache(fingerprint="gpt2 a").adopt(here.cache, source)
    assert other.sequences == ()


def test_a_copy_that_does_not_fit_leaves_nothing_behind() -> None:
    here = DenseMirror(new_cache(config=PAGE_8))
    small = PAGE_8.replace(max_kv_bytes=2 * new_cache(config=PAGE_8).pool.groups[0].bytes_per_page)
    there = new_cache(config=small, max_tokens=16)
    with pytest.raises(OutOfPagesError):
        there.adopt(here.cache, here.new(30))
    assert there.sequences == ()
    assert there.pool.groups[0].allocator.num_used == 0
