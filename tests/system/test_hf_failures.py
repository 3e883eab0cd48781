"""What goes wrong in a forward or a reservation leaves the cache usable and at its committed length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hf_families import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

import tinyserve_ops
from tinyserve_ops import OutOfPagesError
from tinyserve_ops.hf import PackedBatch, new_paged_cache
from tinyserve_ops.hf.support import cache_argument

PAGE_BYTES = 16 * 2 * 16 * 4 * 2 * 2  # 16 tokens, 2 kv heads of 16, fp32, K and V, 2 layers


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 128, (batch, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def forward(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(ids, use_cache=True, **{cache_argument(model): cache}).logits
    return logits


def reserved(model: Any, handle: Any, max_tokens: int) -> tuple[Any, Any]:
    """A cache with a prompt of 20 tokens and room for `max_tokens`, and the model's compiled step."""
    cache = handle.new_cache()
    cache.reserve(max_tokens)
    forward(model, cache, tokens(1, 20))
    return cache, torch.compile(model, backend="aot_eager", fullgraph=True)


def test_a_first_forward_that_runs_out_of_pages_leaves_no_batch_size_behind(model: LlamaForCausalLM) -> None:
    with tinyserve_ops.enable(model, max_kv_bytes=12 * PAGE_BYTES) as handle:
        cache = handle.new_cache(max_tokens=64)
        with pytest.raises(OutOfPagesError):
            forward(model, cache, tokens(4, 100))
        assert cache.get_seq_length() == 0
        forward(model, cache, tokens(1, 20))
        assert cache.get_seq_length() == 20
        cache.kv.check()


def test_a_first_forward_that_fails_in_the_model_leaves_no_batch_size_behind(model: LlamaForCausalLM) -> None:
    with tinyserve_ops.enable(model) as handle:
        cache = handle.new_cache()
        handler = model.model.layers[0].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward(model, cache, tokens(3, 20))
        handler.remove()
        forward(model, cache, tokens(2, 9))
        assert cache.get_seq_length() == 9
        assert cache.batch_size == 2


def test_a_reservation_that_does_not_fit_leaves_the_cache_as_it_was(model: LlamaForCausalLM) -> None:
    with tinyserve_ops.enable(model) as handle:
        cache = handle.new_cache()
        forward(model, cache, tokens(1, 20))
        with pytest.raises(ValueError, match="max_tokens"):
            cache.reserve(10)
        assert not cache.is_compileable
        forward(model, cache, tokens(1, 1))
        assert cache.get_seq_length() == 21


def test_a_prefill_whose_reservation_finds_no_pages_has_not_happened(model: LlamaForCausalLM) -> None:
    with tinyserve_ops.enable(model, max_kv_bytes=12 * PAGE_BYTES) as handle:
        cache = handle.new_cache(max_tokens=64)
        cache.reserve(400)
        with pytest.raises(OutOfPagesError):
            forward(model, cache, tokens(1, 60))
        assert cache.get_seq_length() == 0
        cache.release()
        forward(model, cache, tokens(1, 60))
        assert cache.get_seq_length() == 60


def test_compiled_steps_are_counted_and_the_one_without_room_is_refused(model: LlamaForCausalLM) -> None:
    torch._dynamo.reset()
    with tinyserve_ops.enable(model) as handle, torch.no_grad():
        cache, step = reserved(model, handle, 22)
        for _ in range(2):
            step(**cache.step_inputs(model, tokens(1, 1)))
        with pytest.raises(OutOfPagesError, match="max_tokens"):
            cache.step_inputs(model, tokens(1, 1))
        cache.release()
        assert cache.get_seq_length() == 22
        forward(model, cache, tokens(1, 1))
        assert cache.get_seq_length() == 23


def test_steps_run_past_the_reservation_are_dropped_and_the_cache_goes_on(model: LlamaForCausalLM) -> None:
    torch._dynamo.reset()
    with tinyserve_ops.enable(model) as handle, torch.no_grad():
        cache, step = reserved(model, handle, 22)
        inputs = cache.step_inputs(model, tokens(1, 1))
        for _ in range(6):
            step(**inputs)
        cache.release()
        assert cache.get_seq_length() == 22
        cache.crop(-1)
        cache.reset()
        forward(model, cache, tokens(1, 5))
        assert cache.get_seq_length() == 5


def test_stats_count_reserved_steps_also_after_the_cache_is_gone(model: LlamaForCausalLM) -> None:
    with tinyserve_ops.enable(model, dense_layers=0) as handle:
        cache = handle.new_cache()
        cache.reserve(64)
        forward(model, cache, tokens(1, 20))
        for _ in range(3):
            forward(model, cache, tokens(1, 1))
        assert cache.stats().sparse_steps == 2 * 3
        forward(model, cache, tokens(1, 1))
        del cache
        assert handle.stats().sparse_steps == 2 * 4


def test_a_reserved_cache_is_right_under_another_attention(model: LlamaForCausalLM) -> None:
    ids = tokens(1, 21)
    expected = model(ids).logits[:, -1]
    with tinyserve_ops.enable(model) as handle:
        cache = handle.new_cache()
        cache.reserve(64)
        forward(model, cache, ids[:, :20])
    torch.testing.assert_close(forward(model, cache, ids[:, 20:])[:, -1], expected, atol=1e-5, rtol=1e-5)


def test_a_bad_crop_does_not_end_a_reservation(model: LlamaForCausalLM) -> None:
    with tinyserve_ops.enable(model) as handle, torch.no_grad():
        cache = handle.new_cache()
        cache.reserve(64)
        forward(model, cache, tokens(1, 20))
        with pytest.raises(ValueError, match="length"):
            cache.crop_to(99)
        model(**cache.step_inputs(model, tokens(1, 1)))
        assert int(cache.get_seq_length()) == 21


def test_a_left_padded_batch_is_measured_by_its_real_tokens(model: LlamaForCausalLM) -> None:
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[:, :10] = 0
    with tinyserve_ops.enable(model) as handle, torch.no_grad():
        cache = handle.new_cache()
        cache.reserve(12)
        model(tokens(2, 20), attention_mask=mask, use_cache=True, **{cache_argument(model): cache})
        assert cache.stored_lengths() == [10, 10]


def test_keeping_no_row_empties_the_cache(model: LlamaForCausalLM) -> None:
    with tinyserve_ops.enable(model) as handle:
        cache = handle.new_cache()
        forward(model, cache, tokens(2, 20))
        cache.batch_select_indices(torch.tensor([], dtype=torch.int64))
        assert cache.get_seq_length() == 0
        forward(model, cache, tokens(3, 7))
        assert cache.get_seq_length() == 7


def test_rows_that_overran_their_reservation_unequally_end_at_the_same_step(model: LlamaForCausalLM) -> None:
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :6] = 0
    torch._dynamo.reset()
    with tinyserve_ops.enable(model) as handle, torch.no_grad():
        cache = handle.new_cache()
        cache.reserve(22)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        keywords = {"position_ids": positions, cache_argument(model): cache}
        model(tokens(2, 20), attention_mask=mask, **keywords)
        step = torch.compile(model, backend="aot_eager", fullgraph=True)
        inputs = cache.step_inputs(model, tokens(2, 1))
        for _ in range(5):
            step(**inputs)
        with pytest.raises(RuntimeError, match="without check_room"):
            cache.stored_lengths()
        assert cache.stored_lengths() == [16, 22]
        assert int(cache.get_seq_length()) == 22
        cache.release()
        assert [cache.kv.length(seq) for seq in cache.sequences] == [16, 22]
        cache.kv.check()


def test_steps_that_generate_compiles_stop_where_the_reservation_ends(model: LlamaForCausalLM) -> None:
    torch._dynamo.reset()
    compile_config = transformers.CompileConfig(
        fullgraph=True, dynamic=False, mode="default", backend="aot_eager"
    )
    compile_config._compile_all_devices = True
    with tinyserve_ops.enable(model) as handle, torch.no_grad():
        cache = handle.new_cache()
        cache.reserve(24)
        ids = tokens(1, 20)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
        options |= {"eos_token_id": 999, "pad_token_id": 0, cache_argument(model): cache}
        with pytest.raises(OutOfPagesError, match="max_tokens"):
            model.generate(ids, compile_config=compile_config, **options)
        assert cache.stored_lengths() == [24]
        cache.release()
        forward(model, cache, tokens(1, 2))
        assert cache.get_seq_length() == 26


def test_compiled_and_eager_steps_take_turns_up_to_the_last_reserved_token(model: LlamaForCausalLM) -> None:
    torch._dynamo.reset()
    with tinyserve_ops.enable(model) as handle, torch.no_grad():
        cache, step = reserved(model, handle, 24)
        for _ in range(2):
            step(**cache.step_inputs(model, tokens(1, 1)))
            forward(model, cache, tokens(1, 1))
        with pytest.raises(OutOfPagesError, match="max_tokens"):
            forward(model, cache, tokens(1, 1))
        assert cache.stored_lengths() == [24]


def test_what_can_never_be_reserved_is_refused_before_a_token_is_kept(model: LlamaForCausalLM) -> None:
    with tinyserve_ops.enable(model, record_selection=True) as handle:
        cache = handle.new_cache()
        cache.reserve(64)
        with pytest.raises(ValueError, match="record_selection"):
            forward(model, cache, tokens(1, 20))
        assert cache.get_seq_length() == 0
        cache.release()
        forward(model, cache, tokens(2, 20))
        assert cache.stored_lengths() == [20, 20]


def test_left_padding_beyond_the_reservation_leaves_room_for_every_reserved_token(
    model: LlamaForCausalLM,
) -> None:
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[:, :15] = 0
    with tinyserve_ops.enable(model) as handle, torch.no_grad():
        cache, plain = handle.new_cache(), handle.new_cache()
        cache.reserve(7)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        for c in (cache, plain):
            keywords = {"position_ids": positions, cache_argument(model): c}
            model(tokens(2, 20), attention_mask=mask, **keywords)
        for i in range(2):
            got = model(**cache.step_inputs(model, tokens(2, 1))).logits
            mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
            keywords = {"position_ids": torch.full((2, 1), 5 + i), cache_argument(model): plain}
            torch.testing.assert_close(got, model(tokens(2, 1), attention_mask=mask, **keywords).logits)
        with pytest.raises(OutOfPagesError, match="max_tokens"):
            cache.step_inputs(model, tokens(2, 1))


def test_rows_that_are_not_there_do_not_end_a_reservation(model: LlamaForCausalLM) -> None:
    with tinyserve_ops.enable(model) as handle, torch.no_grad():
        cache = handle.new_cache()
        cache.reserve(64)
        forward(model, cache, tokens(2, 20))
        for change in (
            lambda: cache.crop_to(-1),
            lambda: cache.crop_to(1.5),
            lambda: cache.batch_select_indices(torch.tensor([2])),
            lambda: cache.batch_repeat_interleave(0),
        ):
            with pytest.raises(ValueError, match="expected"):
                change()
        model(**cache.step_inputs(model, tokens(2, 1)))
        assert cache.stored_lengths() == [21, 21]


def test_packed_rows_may_be_decoded_past_the_positions_of_a_rotary_model_and_not_prefilled() -> None:
    model = tiny_model("llama", max_position_embeddings=32)
    with tinyserve_ops.enable(model) as handle, torch.no_grad():
        kv = new_paged_cache(model, handle.config, max_tokens=256)
        batch, a, b = PackedBatch(model, kv), kv.new_sequence(), kv.new_sequence()
        with pytest.raises(RuntimeError, match="inputs"):
            batch.cu_query_lens  # noqa: B018
        model(**batch.inputs([(a, [5] * 31), (b, [6] * 32)]))
        for _ in range(3):
            logits = batch.last_logits(model(**batch.inputs([(a, [7]), (b, [8])])))
        assert logits.shape[0] == 2
        assert [kv.length(seq) for seq in (a, b)] == [34, 35]
        with pytest.raises(ValueError, match="max_position_embeddings"):
            batch.inputs([(a, [7, 8])])
        learned = tiny_model("gpt2", n_positions=32)
    with tinyserve_ops.enable(learned) as handle, torch.no_grad():
        kv = new_paged_cache(learned, handle.config, max_tokens=256)
        batch, seq = PackedBatch(learned, kv), kv.new_sequence()
        learned(**batch.inputs([(seq, [5] * 32)]))
        with pytest.raises(ValueError, match="max_position_embeddings"):
            batch.inputs([(seq, [5])])


def test_a_disabled_model_leaves_no_hook_and_no_finalizer_and_a_refused_one_neither() -> None:
    model = tiny_model("llama")
    handle = tinyserve_ops.enable(model)
    finalizer = handle._finalizer
    handle.disable()
    assert not finalizer.alive
    assert not model._forward_pre_hooks

    def fail(*_: Any) -> None:
        raise RuntimeError("attention")

    model.set_attn_implementation = fail
    with pytest.raises(RuntimeError, match="attention"):
        tinyserve_ops.enable(model)
    assert not model._forward_pre_hooks


def test_generate_goes_on_when_another_thread_takes_the_hook_away_under_it(monkeypatch: Any) -> None:
    from tinyserve_ops.hf import handle as module

    model, ids = tiny_model("llama"), tokens(1, 9)
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    hook = module._prepare_cache
    other = tiny_model("llama")
    with tinyserve_ops.enable(other):
        inside = transformers.GenerationMixin._prepare_cache_for_generation
    assert inside is hook
    # Looked up before the disable, called after it.
    monkeypatch.setattr(model, "_prepare_cache_for_generation", lambda *a, **k: hook(model, *a, **k), False)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)


def test_a_step_reads_no_signature(model: LlamaForCausalLM, monkeypatch: Any) -> None:
    from tinyserve_ops.hf import support

    with tinyserve_ops.enable(model) as handle, torch.no_grad():
        cache = handle.new_cache()
        cache.reserve(64)
        forward(model, cache, tokens(1, 20))
        cache.step_inputs(model, tokens(1, 1))
        monkeypatch.setattr(support.inspect, "signature", None)
        cache.step_inputs(model, tokens(1, 1))


@pytest.mark.parametrize("change", ["shown", "hidden", "moved", "none"])
def test_a_step_whose_mask_moves_padding_is_refused(model: LlamaForCausalLM, change: str) -> None:
    mask = torch.ones(3, 21, dtype=torch.int64)
    mask[0, :6] = mask[2, 8:11] = 0
    with tinyserve_ops.enable(model) as handle, torch.no_grad():
        cache = handle.new_cache()
        keywords = {"position_ids": torch.zeros(3, 20, dtype=torch.int64), cache_argument(model): cache}
        model(tokens(3, 20), attention_mask=mask[:, :20], **keywords)
        if change == "shown":
            mask[0, 5] = 1
        if change == "hidden":
            mask[1, 7] = 0
        if change == "moved":
            mask[2, 8], mask[2, 11] = 1, 0
        keywords["position_ids"] = torch.zeros(3, 1, dtype=torch.int64)
        if change == "none":
            mask[1, 20] = 0  # padding among the new tokens is no contradiction
            model(tokens(3, 1), attention_mask=mask, **keywords)
            assert cache.stored_lengths() == [15, 20, 18]
        else:
            with pytest.raises(ValueError, match="already stored"):
                model(tokens(3, 1), attention_mask=mask, **keywords)
            assert cache.stored_lengths() == [14, 20, 17]
