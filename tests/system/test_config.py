"""SparseConfig: budgets, JSON round trip, and refusals that name the argument."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tinyserve_ops import SparseConfig


def test_a_config_without_a_budget_takes_2048_tokens():
    assert SparseConfig().token_budget == 2048
    assert SparseConfig().page_budget(10_000) == 128


def test_a_token_budget_rounds_down_to_pages():
    assert SparseConfig(token_budget=100, page_size=16).page_budget(50) == 6


@pytest.mark.parametrize(
    ("ratio", "num_pages", "expected"),
    [
        (0.07, 100, 7),
        (0.1, 30, 3),
        (0.3, 10, 3),
        (0.3, 11, 4),
        (1 / 3, 9, 3),
        (1.0, 77, 77),
        (0.55, 100, 55),
        (0.001, 5, 3),
    ],
)
def test_a_keep_ratio_rounds_up_exactly_as_its_decimal_says(ratio, num_pages, expected):
    assert SparseConfig(keep_ratio=ratio).page_budget(num_pages) == expected


def test_a_ratio_never_goes_below_the_forced_pages():
    config = SparseConfig(keep_ratio=0.1, num_sink_pages=2, num_recent_pages=3)
    assert [config.page_budget(n) for n in (0, 1, 10, 51, 100)] == [5, 5, 5, 6, 10]


def test_covers_tells_whether_selection_can_leave_anything_out():
    config = SparseConfig(token_budget=64, page_size=16)
    assert config.covers(64)
    assert not config.covers(65)
    assert SparseConfig(keep_ratio=1.0).covers(12_345)


def test_a_config_survives_json_and_compares_equal():
    config = SparseConfig(
        keep_ratio=0.3, scorer="mean_std", kv_dtype="bfloat16", dense_layers=0, max_kv_bytes=1 << 20
    )
    assert SparseConfig.from_json(config.to_json()) == config
    assert SparseConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert len({config, SparseConfig.from_json(config.to_json())}) == 1


def test_a_low_rank_config_survives_json_with_its_default_group_reduction():
    config = SparseConfig(scorer="low_rank")
    assert config.group_reduction is None
    assert config.to_dict()["group_reduction"] is None
    assert SparseConfig.from_json(config.to_json()) == config
    assert config.op_group_reduction == "softmax"
    assert config.replace(scorer="bounds").op_group_reduction == "mean"
    assert config.replace(group_reduction="max").op_group_reduction == "max"


@pytest.mark.parametrize("scorer", ["low_rank_1", "low_rank_8", "low_rank_max", "low_rank_max_4"])
def test_low_rank_scorers_are_named_with_or_without_a_rank(scorer):
    assert SparseConfig(scorer=scorer).scorer == scorer


def test_replace_validates_and_switches_the_kind_of_budget():
    config = SparseConfig(token_budget=256).replace(keep_ratio=0.5)
    assert config.token_budget is None
    assert config.replace(token_budget=512).keep_ratio is None
    with pytest.raises(ValueError, match="page_size"):
        config.replace(page_size=0)


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SparseConfig().page_size = 8


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"page_size": 0}, ValueError, "page_size"),
        ({"page_size": 65}, ValueError, "page_size"),
        ({"page_size": 16.0}, TypeError, "page_size"),
        ({"token_budget": -1}, ValueError, "token_budget"),
        ({"token_budget": 47}, ValueError, "token_budget.*at least 48"),
        ({"token_budget": 512, "keep_ratio": 0.3}, ValueError, "token_budget, keep_ratio"),
        ({"keep_ratio": 0.0}, ValueError, "keep_ratio"),
        ({"keep_ratio": 1.5}, ValueError, "keep_ratio"),
        ({"keep_ratio": float("nan")}, ValueError, "keep_ratio"),
        ({"keep_ratio": "half"}, TypeError, "keep_ratio"),
        ({"num_recent_pages": 0}, ValueError, "num_recent_pages"),
        ({"num_sink_pages": -1}, ValueError, "num_sink_pages"),
        ({"num_sink_pages": 2**31}, ValueError, "num_sink_pages.*65536"),
        ({"num_recent_pages": 2**40}, ValueError, "num_recent_pages.*65536"),
        ({"dense_layers": -1}, ValueError, "dense_layers"),
        ({"scorer": "best"}, ValueError, "scorer.*bounds"),
        ({"scorer": 3}, TypeError, "scorer"),
        ({"scorer": "low_rank_9"}, ValueError, "scorer.*low_rank_1 to low_rank_8"),
        ({"scorer": "bounds_full_fp16"}, ValueError, "scorer.*bounds_full"),
        ({"scorer": "low_rank_2", "page_size": 2, "token_budget": 64}, ValueError, "scorer.*at most.*1"),
        ({"scorer": "low_rank_1", "page_size": 1, "token_budget": 64}, ValueError, "scorer.*at most.*0"),
        ({"group_reduction": "sum"}, ValueError, "group_reduction"),
        ({"group_reduction": 3}, TypeError, "group_reduction"),
        ({"group_reduction": "mean", "scorer": "low_rank"}, ValueError, "group_reduction.*max, softmax"),
        ({"kv_dtype": "int4"}, ValueError, "kv_dtype"),
        ({"kv_dtype": "int8", "scorer": "bounds_full"}, ValueError, "scorer: expected 'bounds'.*bounds_full"),
        ({"max_kv_bytes": 0}, ValueError, "max_kv_bytes"),
        ({"record_selection": 1}, TypeError, "record_selection"),
    ],
)
def test_a_bad_option_is_refused_by_name(options, error, name):
    with pytest.raises(error, match=name):
        SparseConfig(**options)


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(ValueError, match="budget_tokens"):
        SparseConfig.from_dict({"budget_tokens": 5})


def test_a_default_budget_stays_a_default_when_other_values_change():
    config = SparseConfig().replace(page_size=64, num_recent_pages=40)
    assert config == SparseConfig(page_size=64, num_recent_pages=40)
    assert config.token_budget == 41 * 64
    assert config.replace(page_size=16, num_recent_pages=2).token_budget == 2048
    assert SparseConfig().to_dict()["token_budget"] is None
    assert SparseConfig.from_json(config.to_json()).replace(num_recent_pages=1).token_budget == 2048
    assert SparseConfig(token_budget=2048).to_dict()["token_budget"] == 2048
    with pytest.raises(ValueError, match="token_budget"):
        SparseConfig(token_budget=2048).replace(page_size=64, num_recent_pages=40)
