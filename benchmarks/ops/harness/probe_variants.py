"""The probes of a run: what a variant reads, and whole pools from end to end."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.ops.harness import probe
from benchmarks.ops.harness.layers import Layers
from benchmarks.ops.harness.run import Run, name_of, setup_facts
from benchmarks.ops.harness.timing import Variant


def add_probe(run: Run, variant: Variant, segments_of: Callable[[int, str], probe.Segments]) -> str | None:
    """The probe of what `variant` reads; its name, or None without a C compiler.

    Args:
        segments_of: what it reads of a layer, in one of `probe.ORDERS`.
    """
    if not probe.has_reader():
        return None
    layers = sorted(set(variant.layers))
    candidates = {order: [segments_of(layer, order) for layer in layers] for order in probe.ORDERS}
    order, reader, reader_name = probe.fastest_reader(variant.threads, candidates)
    segments = candidates[order]
    parts = [reader.split(each) for each in segments]
    facts = variant.facts | {"op": "read_probe", "variant": f"probe of {variant.facts['variant']}"}
    facts |= {"reader": reader_name, "order": order}
    probe_variant = Variant(
        f"probe of {variant.name}",
        lambda layer: reader(parts[layer]),
        variant.layers,
        segments[0].num_bytes,
        variant.threads,
        facts,
        times_itself=True,
    )
    return run.add(probe_variant).name


def add_stream(run: Run, layers: Layers) -> None:
    """K and V of the pools from end to end, by the C reader and by torch's sum: the machine's own limit."""
    threads, pools = run.settings.threads, layers.pools
    num_bytes = probe.pool_segments(pools[0]).num_bytes
    reads = {"torch": lambda layer: probe.torch_read([pools[layer].k_pages, pools[layer].v_pages])}
    if probe.has_reader():
        reader = probe.Reader(threads)
        parts = [reader.split(probe.pool_segments(pool)) for pool in pools]
        reads["c"] = lambda layer: reader(parts[layer])
    for name, read in reads.items():
        facts = {
            "op": "read_stream",
            "variant": f"stream, {name}",
            **setup_facts(layers.setup),
            "reader": name,
        }
        layers_of_pass = run.passes(layers, num_bytes)
        unique = name_of(run, layers, f"stream {name}", threads)
        run.add(Variant(unique, read, layers_of_pass, num_bytes, threads, facts, times_itself=True))
