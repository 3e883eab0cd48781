"""Export and import: bit-exact, sharing kept, and refused by field when foreign or damaged."""

from __future__ import annotations

import json
import pickle
import struct

import pytest
import torch
from dense_mirror import NUM_LAYERS, DenseMirror, new_cache

from tinyserve_ops import OutOfPagesError, PagedKVCache, PagePool, SparseConfig

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
CONFIG = SparseConfig(page_size=4, token_budget=16, dense_layers=0)


def filled(**options) -> tuple[DenseMirror, list[int]]:
    """Four sequences: two that share a prefix, one empty, one that ends at a page boundary."""
    mirror = DenseMirror(new_cache(config=CONFIG, **options))
    first = mirror.new(18)
    second = mirror.fork(first)
    mirror.step([(first, 1), (second, 3)], check=False)
    mirror.cache.set_next_position(first, 50)
    return mirror, [first, second, mirror.new(), mirror.new(8)]


def header_of(data: bytes) -> dict:
    (size,) = struct.unpack_from("<Q", data, 16)
    return json.loads(data[24 : 24 + size])


def with_header(data: bytes, header: dict) -> bytes:
    (size,) = struct.unpack_from("<Q", data, 16)
    payload = data[24 + size + -(24 + size) % 64 :]
    text = json.dumps(header).encode()
    prefix = data[:16] + struct.pack("<Q", len(text)) + text
    return prefix + bytes(-len(prefix) % 64) + payload


@pytest.mark.parametrize("groups", [None, [[0, 2], [1]]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_a_round_trip_is_bit_exact_and_keeps_prefixes_shared(dtype, groups):
    mirror, seqs = filled(dtype=dtype, layer_groups=groups)
    data = mirror.cache.export(seqs)
    other = DenseMirror(new_cache(config=CONFIG, dtype=dtype, layer_groups=groups, max_tokens=8))
    other.new(5)
    handles = other.cache.import_(data)
    assert other.cache.export(handles) == data
    for seq, handle in zip(seqs, handles, strict=True):
        other.tokens[handle] = list(mirror.tokens[seq])
        other.assert_contents(handle)
        assert other.cache.next_position(handle) == mirror.cache.next_position(seq)
    assert mirror.cache.pool.groups[0].allocator.num_used == 9
    assert other.cache.pool.groups[0].allocator.num_used == 9 + 2
    other.cache.check()


@DTYPES
def test_an_imported_sequence_decodes_as_the_original_does(dtype):
    mirror, seqs = filled(dtype=dtype)
    other = DenseMirror(new_cache(config=CONFIG, dtype=dtype))
    handles = other.cache.import_(mirror.cache.export(seqs))
    for seq, handle in zip(seqs, handles, strict=True):
        other.tokens[handle] = list(mirror.tokens[seq])
    other.generator.set_state(mirror.generator.get_state())
    ours = mirror.step([(seq, 1) for seq in seqs], check=False)
    theirs = other.step([(handle, 1) for handle in handles], check=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@DTYPES
def test_slots_beyond_the_length_are_not_exported(dtype):
    mirror = DenseMirror(new_cache(config=CONFIG, dtype=dtype))
    seq = mirror.new(11)
    data = mirror.cache.export([seq])
    for _ in range(3):
        mirror.step([(seq, 1)], check=False)
    mirror.crop(seq, 11)
    assert mirror.cache.export([seq]) == data


@DTYPES
def test_layouts_of_the_pool_exchange_data(dtype):
    mirror, seqs = filled(dtype=dtype)
    pool = PagePool(NUM_LAYERS, 2, 16, config=CONFIG, dtype=dtype, max_tokens=64, channel_major=False)
    other = new_cache(config=CONFIG, dtype=dtype, pool=pool)
    data = mirror.cache.export(seqs)
    assert other.export(other.import_(data)) == data


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("fingerprint", {"fingerprint": "another model"}),
        ("page_size", {"config": CONFIG.replace(page_size=2)}),
        ("scorer", {"config": CONFIG.replace(scorer="mean")}),
        ("kv_dtype", {"dtype": torch.float16}),
        ("kv_dtype", {"dtype": torch.int8}),
        ("layer_groups", {"layer_groups": [[0], [1, 2]]}),
    ],
)
def test_data_of_another_model_or_format_is_refused_by_field(field, options):
    mirror, seqs = filled()
    other = new_cache(**{"config": CONFIG, **options})
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        other.import_(mirror.cache.export(seqs))
    assert other.sequences == ()


@pytest.mark.parametrize(
    ("field", "shape"), [("num_layers", (4, 2, 16)), ("num_kv_heads", (3, 4, 16)), ("head_dim", (3, 2, 8))]
)
def test_data_of_another_shape_is_refused_by_field(field, shape):
    mirror, seqs = filled()
    other = PagedKVCache(*shape, config=CONFIG, max_tokens=64)
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        other.import_(mirror.cache.export(seqs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "data"),
        (lambda data: data[:40], "data"),
        (lambda data: b"PK" + data[2:], "magic"),
        (lambda data: data[:8] + b"\x07" + data[9:], "version"),
        (lambda data: data[:24] + b"\xff" + data[25:], "header"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "payload_crc32"),
        (lambda data: data[:-64], "data: expected"),
        (lambda data: data + bytes(64), "data: expected"),
    ],
)
def test_damaged_data_is_refused(change, message):
    mirror, seqs = filled()
    seqs = [seqs[3]]
    data = mirror.cache.export(seqs)
    with pytest.raises(ValueError, match=message):
        mirror.cache.import_(change(data))
    mirror.cache.check()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", None, None),
        ("layout", "token_head_page", "layout"),
        ("num_pages", [2**40], "num_pages"),
        ("num_pages", [5], "payload_bytes"),
        ("payload_bytes", 0, "payload_bytes"),
        ("sequences", "all", "sequences"),
        ("sequences", [{"length": 8, "next_position": 8, "pages": [[0, 2]]}], r"sequences\[0\].*below 2"),
        ("sequences", [{"length": 8, "next_position": 8, "pages": [[0, -1]]}], r"sequences\[0\].*below 2"),
        ("sequences", [{"length": 9, "next_position": 8, "pages": [[0, 1]]}], r"sequences\[0\].*9 tokens"),
        ("sequences", [{"length": -8, "next_position": 8, "pages": [[]]}], r"sequences\[0\]"),
        ("sequences", [{"length": 8, "next_position": 8}], r"sequences\[0\]"),
    ],
)
def test_a_forged_header_is_refused(field, value, message):
    mirror, seqs = filled()
    data = mirror.cache.export([seqs[3]])
    header = header_of(data)
    assert with_header(data, header) == data
    if message is None:
        return
    with pytest.raises(ValueError, match=message):
        mirror.cache.import_(with_header(data, {**header, field: value}))
    mirror.cache.check()


def test_an_import_that_does_not_fit_leaves_the_cache_as_it_was():
    mirror, seqs = filled()
    page_bytes = mirror.cache.pool.groups[0].bytes_per_page
    small = new_cache(config=CONFIG.replace(max_kv_bytes=6 * page_bytes))
    with pytest.raises(OutOfPagesError):
        small.import_(mirror.cache.export(seqs))
    assert small.sequences == ()
    assert small.pool.groups[0].allocator.num_used == 0


def test_a_cache_is_not_pickled():
    with pytest.raises(TypeError, match="export"):
        pickle.dumps(new_cache())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_an_empty_sequence_alone_comes_back_empty(dtype):
    cache = new_cache(config=CONFIG, dtype=dtype)
    data = cache.export([cache.new_sequence()])
    (handle,) = cache.import_(data)
    assert cache.length(handle) == 0
    assert cache.export([handle]) == data
    assert cache.import_(cache.export([])) == []
