"""Policy and plugins from a YAML file."""

from __future__ import annotations

import pytest

pytest.importorskip("yaml")

from tinyserve.errors import UsageError
from tinyserve.pipeline import Pipeline, load_pipeline
from tinyserve_ops.plugins import ApproximateAttention, EarlyExit
from tinyserve_ops.policies import StreamingLLM


def load(tmp_path, text):
    path = tmp_path / "pipeline.yaml"
    path.write_text(text)
    return load_pipeline(path)


def test_policy_and_plugins_come_in_the_order_of_the_file(tmp_path):
    text = """
policy: {name: streaming_llm, window: 2048}
plugins:
  - {name: approximate_attention, estimate: false, enabled: false}
  - early_exit
"""
    expected = (ApproximateAttention(estimate=False, enabled=False), EarlyExit())
    assert load(tmp_path, text) == Pipeline(StreamingLLM(window=2048), expected)
    assert load(tmp_path, "policy: streaming_llm\n") == Pipeline(StreamingLLM(), ())
    assert load(tmp_path, "") == Pipeline(None, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: [", "expected a YAML file"),
        ("- early_exit", "expected a mapping with policy and plugins, got list"),
        ("plugin: early_exit", r"expected a mapping with policy and plugins, got \['plugin'\]"),
        ("policy: nothing", "policy: expected one of"),
        ("policy: 3", "policy: expected a Policy, a name or None, got int"),
        ("plugins: early_exit", "plugins: expected a list of plugins, got str"),
        ("plugins: [{name: early_exit, threshold: high}]", "threshold: expected a number"),
        ("plugins: [early]", "plugin: expected one of"),
    ],
)
def test_what_does_not_fit_is_one_line_that_names_the_file(tmp_path, text, message):
    with pytest.raises(UsageError, match=rf"pipeline\.yaml: .*{message}"):
        load(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none\.yaml: expected a YAML file"):
        load_pipeline(tmp_path / "none.yaml")
