"""Early exit against a mirror that runs the model's own layers one by one, without cache and pages."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from hf_families import forward, greedy, left_padded, tiny_model, tokens

import tinyserve_ops
from tinyserve_ops import SparseConfig
from tinyserve_ops.hf import PackedBatch, TinyServeCache, new_paged_cache
from tinyserve_ops.plugins import EarlyExit
from tinyserve_ops.policies import EntropyStop

DENSE = SparseConfig(page_size=4, token_budget=1024, dense_layers=0)
FAMILIES = ("llama", "gpt2", "qwen2", "qwen3", "mistral")
NUM_LAYERS = 4


def deep_model(family: str, sharp: float = 1.0) -> Any:
    """Four layers; `sharp` spreads the logits, so that their entropies fall on both sides of a threshold."""
    model = tiny_model(family, **({"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}))
    with torch.no_grad():
        norm = model.base_model.ln_f if family == "gpt2" else model.base_model.norm
        norm.weight.mul_(sharp)
    return model


def layer_entropies(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logit-lens entropy of every token behind every layer but the last, [layers - 1, tokens], float64."""
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states[1:-1]
        norm = model.base_model.ln_f if hasattr(model.base_model, "ln_f") else model.base_model.norm
        logits = torch.stack([model.get_output_embeddings()(norm(state[0])) for state in states]).double()
    return torch.distributions.Categorical(logits=logits).entropy()


class Mirror:
    """A model run over whole sequences without a cache; the state of a token that has left stays."""

    def __init__(self, model: Any, first: int, threshold: float, min_layers: int, every: int) -> None:
        self.model = model
        self.first, self.threshold = first, threshold
        self.looks = range(min_layers - 1, NUM_LAYERS - 1, every)
        self.exits: dict[int, int] = {}

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary] of one sequence [1, tokens]; tokens from `first` on may leave."""
        base = self.model.base_model
        layers = base.h if hasattr(base, "h") else base.layers
        left = torch.zeros(ids.size(1), dtype=torch.bool)
        norm = base.ln_f if hasattr(base, "ln_f") else base.norm
        self.exits.clear()

        def after(layer_idx: int, hidden: torch.Tensor, result: Any) -> Any:
            out = result[0] if isinstance(result, tuple) else result  # GPT-2 of transformers 4.57
            out = torch.where(left[None, :, None], hidden, out)
            if layer_idx in self.looks:
                logits = self.model.get_output_embeddings()(norm(out[0])).double()
                sure = torch.distributions.Categorical(logits=logits).entropy() < self.threshold
                sure[: self.first] = False
                self.exits[layer_idx] = int((sure & ~left).sum())
                left.logical_or_(sure)
            return (out, *result[1:]) if isinstance(result, tuple) else out

        hooks = [
            layer.register_forward_hook(
                lambda module, args, out, layer_idx=layer_idx: after(layer_idx, args[0], out)
            )
            for layer_idx, layer in enumerate(layers)
        ]
        try:
            with torch.no_grad():
                return self.model(ids, use_cache=False).logits[0]
        finally:
            for hook in hooks:
                hook.remove()


def steps(model: Any, cache: Any, ids: torch.Tensor, prompt: int, pieces: list[int]) -> torch.Tensor:
    """Logits [tokens after the prompt, vocabulary] of one row fed in pieces."""
    forward(model, ids[:, :prompt], cache)
    outs, at = [], prompt
    for piece in pieces:
        positions = torch.arange(at, at + piece)[None]
        outs.append(forward(model, ids[:, at : at + piece], cache, position_ids=positions)[0])
        at += piece
    return torch.cat(outs)


def median_threshold(model: Any, ids: torch.Tensor) -> float:
    """An entropy that about half the tokens stay below, between two that differ."""
    values = layer_entropies(model, ids).flatten().sort().values
    middle = values.numel() // 2
    window = values[middle - 10 : middle + 10]
    widest = int(window.diff().argmax())
    return float(window[widest : widest + 2].mean())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pieces", [[1] * 24, [7, 1, 16]], ids=["single", "pieces"])
def test_tokens_that_leave_early_answer_from_the_state_they_left_with(family, pieces):
    model = deep_model(family, sharp=3.0)
    ids = tokens(1, 54)
    threshold = median_threshold(model, ids)
    mirror = Mirror(model, 30, threshold, min_layers=1, every=1)
    expected = mirror.logits(ids)[30:]
    exits = {str(layer): n for layer, n in mirror.exits.items() if n}
    assert 0 < sum(exits.values()) < 24  # some leave, some don't
    plugin = EarlyExit(threshold=threshold, min_layers=1, every=1)
    with tinyserve_ops.enable(model, DENSE, plugins=[plugin]) as handle:
        cache = handle.new_cache()
        got = steps(model, cache, ids, 30, pieces)
        report = cache.plugin_reports()["early_exit"]
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    assert report["exits_by_layer"] == exits
    left_out = sum((NUM_LAYERS - 1 - int(layer)) * n for layer, n in exits.items())
    assert report["layers_skipped"] + report["layers_dropped"] == left_out
    if pieces == [1] * 24:  # a token alone is never computed for others
        assert report["layers_dropped"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_left_out_layer_stores_is_what_the_layer_itself_stores(family):
    """Row 0 leaves: alone, its layers are left out; beside a row that stays they are computed."""
    model = deep_model(family)
    ids = tokens(2, 21)
    entropies = [float(layer_entropies(model, ids[row : row + 1])[0, -1]) for row in range(2)]
    rows = [0, 1] if entropies[0] < entropies[1] else [1, 0]
    ids, threshold = ids[rows], sum(entropies) / 2
    plugin = EarlyExit(threshold=threshold, min_layers=1, every=NUM_LAYERS)
    stored = []
    with tinyserve_ops.enable(model, DENSE, plugins=[plugin]) as handle:
        for batch in (ids, ids[:1]):
            cache = handle.new_cache()
            forward(model, batch[:, :20], cache)
            forward(model, batch[:, 20:], cache)
            report = cache.plugin_reports()["early_exit"]
            assert report["exits"] == 1
            dropped = 3 if batch.size(0) == 2 else 0
            assert (report["layers_dropped"], report["layers_skipped"]) == (dropped, 3 - dropped)
            stored.append([torch.stack(cache.kv.dense(layer, cache.sequences[0])) for layer in range(4)])
    for computed, left_out in zip(*stored, strict=True):
        torch.testing.assert_close(left_out, computed, atol=1e-5, rtol=1e-5)
        assert not torch.equal(computed[0, :, -1], torch.zeros_like(computed[0, :, -1]))


def test_padded_rows_leave_as_they_do_alone():
    model = deep_model("llama", sharp=3.0)
    ids, mask = left_padded(tokens(3, 40), [0, 13, 31])
    plugin = EarlyExit(threshold=median_threshold(model, ids[:1]), min_layers=1, every=1)
    with tinyserve_ops.enable(model, DENSE, plugins=[plugin]) as handle:
        together = greedy(model, ids, mask, new=10)
        exits = handle.plugin_reports()["early_exit"]["exits"]
        alone = 0
        for row, pads in enumerate((0, 13, 31)):
            assert torch.equal(together[row, pads:], greedy(model, ids[row : row + 1, pads:], new=10)[0])
            alone += handle.plugin_reports()["early_exit"]["exits"]
        assert exits == alone > 0


def test_a_packed_batch_leaves_as_a_padded_one_does():
    model = deep_model("llama", sharp=3.0)
    ids = tokens(2, 30)
    prompts = [ids[0].tolist(), ids[1, :17].tolist()]
    plugin = EarlyExit(threshold=median_threshold(model, ids[:1]), min_layers=1, every=1)
    with tinyserve_ops.enable(model, DENSE, plugins=[plugin]) as handle, torch.no_grad():
        kv = new_paged_cache(model, DENSE, max_tokens=256, plugins=handle.plugins)
        batch, seqs, new = PackedBatch(model, kv), [kv.new_sequence() for _ in prompts], prompts
        got: list[list[int]] = [[], []]
        for _ in range(8):
            logits = batch.last_logits(model(**batch.inputs(zip(seqs, new, strict=True))))
            new = [[token] for token in logits.argmax(-1).tolist()]
            got = [row + token for row, token in zip(got, new, strict=True)]
        assert kv.plugin_reports()["early_exit"]["exits"] > 0
        for prompt, row in zip(prompts, got, strict=True):
            assert greedy(model, torch.tensor([prompt]), new=8)[0, len(prompt) :].tolist() == row


@pytest.mark.parametrize("family", FAMILIES)
def test_a_threshold_of_zero_and_a_plugin_that_is_off_change_no_bit(family):
    model = deep_model(family)
    ids = tokens(1, 50)
    sparse = SparseConfig(page_size=4, token_budget=16, dense_layers=1)
    found = []
    for plugins in (None, [], [EarlyExit(enabled=False)], [EarlyExit(threshold=0.0, min_layers=1, every=1)]):
        with tinyserve_ops.enable(model, sparse, plugins=plugins) as handle:
            cache = handle.new_cache()
            found.append(steps(model, cache, ids, 40, [1] * 10))
            assert bool(cache.plugin_reports()) == (len(found) == 4)
            layers = model.base_model.h if family == "gpt2" else model.base_model.layers
            assert all(("forward" in vars(layer)) == (len(found) == 4) for layer in layers)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert not any("forward" in vars(layer) for layer in layers)


def test_a_failed_forward_leaves_no_exit_behind():
    model = deep_model("llama")
    ids = tokens(1, 33)
    plugin = EarlyExit(threshold=100.0, min_layers=1, every=1)  # every token leaves behind layer 0
    with tinyserve_ops.enable(model, DENSE, plugins=[plugin]) as handle:
        cache, other = handle.new_cache(), handle.new_cache()
        for each in (cache, other):
            forward(model, ids[:, :30], each)
        norm = model.base_model.layers[2].input_layernorm
        hook = norm.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
        with pytest.raises(RuntimeError, match="stop"):
            forward(model, ids[:, 30:31], cache)
        hook.remove()
        got = [steps_of(model, each, ids[:, 30:]) for each in (cache, other)]
        assert torch.equal(*got)
        assert cache.get_seq_length() == 33


def steps_of(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([forward(model, token, cache) for token in ids.split(1, dim=1)], dim=1)


def test_copies_and_forks_go_on_with_the_plugin_or_without_it():
    model = deep_model("llama")
    ids = tokens(1, 31)
    plugin = EarlyExit(threshold=100.0, min_layers=1, every=1)
    with tinyserve_ops.enable(model, DENSE, plugins=[plugin]) as handle:
        cache = handle.new_cache()
        forward(model, ids[:, :30], cache)
        same, plain = copy.deepcopy(cache), cache.copy(plugins=[])
        got = [forward(model, ids[:, 30:], each) for each in (cache, same, plain)]
        assert torch.equal(got[0], got[1])
        assert not torch.allclose(got[0], got[2])
        assert plain.plugin_reports() == {}
    torch.testing.assert_close(got[2][0], model(ids).logits[0, -1:].detach(), atol=1e-3, rtol=1e-3)


def test_a_copy_of_an_enabled_model_is_hooked_once():
    model = deep_model("llama")
    ids = tokens(1, 31)
    plugin = EarlyExit(threshold=100.0, min_layers=1, every=1)
    with tinyserve_ops.enable(model, DENSE, plugins=[plugin]):
        other = copy.deepcopy(model)
    with tinyserve_ops.enable(other, DENSE, plugins=[plugin]) as handle:
        cache = handle.new_cache()
        steps(other, cache, ids, 30, [1])
        assert cache.plugin_reports()["early_exit"]["looks"] == 1


def test_entropy_stop_is_a_full_cache_with_early_exit():
    model = deep_model("llama", sharp=3.0)
    ids = tokens(1, 60)
    small = DENSE.replace(token_budget=16)
    # As the plugin's defaults have it: behind half the layers, and then every fourth.
    threshold = float(layer_entropies(model, ids)[1, 40:].median()) + 1e-4
    expected = Mirror(model, 40, threshold, min_layers=2, every=4).logits(ids)[40:]
    with tinyserve_ops.enable(model, small, policy=EntropyStop(threshold=threshold)) as handle:
        cache = handle.new_cache()
        got = steps(model, cache, ids, 40, [1] * 20)
        assert cache.plugins == (EarlyExit(threshold=threshold),)
        assert 0 < cache.plugin_reports()["early_exit"]["exits"] < 20
        assert cache.stats().sparse_steps == 0
        with pytest.raises(ValueError, match="policy: expected None, full_cache or query_aware"):
            handle.new_cache().reserve(99)
        with pytest.raises(ValueError, match="plugins: expected each at most once, got 'early_exit'"):
            TinyServeCache(model.config, policy="entropy_stop", plugins=["early_exit"])
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    assert EntropyStop().threshold == 0.5


def test_what_can_not_be_honoured_is_refused_by_name():
    plugin = EarlyExit()
    with pytest.raises(ValueError, match=r"model_type: expected one of .* with early exit, got 'opt'"):
        tinyserve_ops.enable(tiny_model("opt"), plugins=[plugin])
    llama = deep_model("llama")
    with pytest.raises(ValueError, match="model: expected one with a language modelling head"):
        tinyserve_ops.enable(llama.base_model, plugins=[plugin])
    with pytest.raises(ValueError, match="policy: expected one that need not see every query"):
        tinyserve_ops.enable(llama, policy="h2o", plugins=[plugin])
    with tinyserve_ops.enable(llama):
        own = TinyServeCache(llama.config, plugins=[plugin])
        with pytest.raises(ValueError, match="plugins: expected a model enabled with an early-exit plugin"):
            forward(llama, tokens(1, 9), own)
        with pytest.raises(ValueError, match="plugins: expected a model enabled with an early-exit plugin"):
            PackedBatch(llama, new_paged_cache(llama, plugins=[plugin]))
    with tinyserve_ops.enable(llama, plugins=[plugin]) as handle:
        with pytest.raises(ValueError, match="plugins: expected none with reserved decoding"):
            handle.new_cache().reserve(64)
        cache = handle.new_cache()
        llama.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match=r"attn_implementation: expected .* with .*early_exit"):
            forward(llama, tokens(1, 9), cache)
        llama.set_attn_implementation("tinyserve")
    with pytest.raises(ValueError, match="threshold: expected a number from 0"):
        EarlyExit(threshold=-1)
