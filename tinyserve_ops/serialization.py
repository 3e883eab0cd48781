"""Sequences of a cache as bytes, for disk and for another process: a JSON header, then raw little-endian
tensors.

Layout: 8 bytes magic, u32 version, u32 zero, u64 header size, header (JSON, UTF-8), zero padding to 64, then
the tensors, each aligned to 64. Nothing in it is executed and no size in it is believed: shapes follow from
the receiving cache, and a header that disagrees is refused by the field's name. Pages are stored once however
many sequences share them, int8 pages with their scales; slots beyond a sequence's length are written as
zeros, so nothing of other requests leaks and equal sequences give equal bytes.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch

from tinyserve_ops import ops
from tinyserve_ops.scorers import resolve

if TYPE_CHECKING:
    from tinyserve_ops.cache import PagedKVCache
    from tinyserve_ops.layer_pool import LayerPool

__all__ = ["VERSION", "export_sequences", "import_sequences"]

MAGIC = b"TINYSVKV"
VERSION = 1
LAYOUT = "page_head_token_dim"  # of the file; pools of any stride layout exchange it
_ALIGNMENT = 64
_PREFIX = struct.Struct("<8sIIQ")


def export_sequences(cache: PagedKVCache, seqs: Sequence[int]) -> bytes:
    """The committed tokens of `seqs`: pages, summaries, lengths, next positions. An open forward is not part
    of it.

    Args:
        cache: left unchanged.
        seqs: handles, in the order in which `import_sequences` gives them back.

    Returns:
        Bytes for `import_sequences`.

    Raises:
        ValueError: a sequence has lost tokens to eviction.
    """
    unique: list[dict[int, int]] = [{} for _ in cache.layer_groups]  # page id -> index in the file
    partial: list[dict[int, int]] = [{} for _ in cache.layer_groups]  # index in the file -> tokens in use
    page_size = cache.config.page_size
    entries = []
    for seq in seqs:
        length = cache.length(seq)
        if length != cache.num_tokens(seq) or any(
            cache.length(seq, group) != length for group in range(len(cache.layer_groups))
        ):
            raise ValueError(f"seqs: expected sequences with all their tokens, got {seq}, which evicted some")
        pages = []
        for group in range(len(cache.layer_groups)):
            page_ids = cache.page_ids(seq, group).tolist()
            # A page that one sequence has full may be open in another one's view: the fuller view decides.
            pages.append([unique[group].setdefault(page_id, len(unique[group])) for page_id in page_ids])
            for logical, index in enumerate(pages[-1]):
                used = min(page_size, length - logical * page_size)
                partial[group][index] = max(used, partial[group].get(index, 0))
        entries.append({"length": length, "next_position": cache.next_position(seq), "pages": pages})
    tensors: list[bytes] = []
    for layer_idx in range(cache.num_layers):
        group = cache.group_of_layer[layer_idx]
        ids = torch.tensor(list(unique[group]), dtype=torch.int32, device=cache.device)
        in_use = [partial[group][index] for index in range(len(unique[group]))]
        tensors += [_to_bytes(part) for part in _gather(cache.pool.layers[layer_idx], ids, in_use)]
    payload = bytearray()
    for data in tensors:
        payload += data
        payload += bytes(-len(payload) % _ALIGNMENT)
    header = {
        **_description(cache),
        "num_pages": [len(group) for group in unique],
        "sequences": entries,
        "payload_bytes": len(payload),
        "payload_crc32": zlib.crc32(payload),
    }
    text = json.dumps(header).encode()
    prefix = _PREFIX.pack(MAGIC, VERSION, 0, len(text)) + text
    return b"".join((prefix, bytes(-len(prefix) % _ALIGNMENT), payload))


def import_sequences(cache: PagedKVCache, data: bytes) -> list[int]:
    """Adds the sequences in `data` to a cache of the same model and page format.

    Returns:
        Their handles, in the order of the export.

    Raises:
        ValueError: damaged or foreign data, naming the field; nothing changed.
        OutOfPagesError: nothing changed.
    """
    if cache.plan.eviction is not None:
        raise ValueError(
            f"policy: expected one that evicts nothing, got {cache.policy}, which has not seen the sequences"
        )
    header, payload = _parse(data)
    for name, expected in _description(cache).items():
        if header.get(name) != expected:
            raise ValueError(f"{name}: expected {expected!r}, as in this cache, got {header.get(name)!r}")
    num_pages = _check_counts(header.get("num_pages"), len(cache.layer_groups))
    entries = _check_sequences(header.get("sequences"), num_pages, cache.config.page_size)
    _check_payload(header, payload, _payload_bytes(cache, num_pages))

    layers = _read_layers(cache, num_pages, payload)
    handles: list[int] = []
    try:
        for index in range(len(entries)):
            _restore(cache, handles, entries, index, layers)
    except BaseException:
        for handle in handles:
            cache.free(handle)
        raise
    return handles


def _description(cache: PagedKVCache) -> dict[str, Any]:
    """What both sides must agree on, by the name that a mismatch is reported under."""
    return {
        "fingerprint": cache.fingerprint,
        "num_layers": cache.num_layers,
        "num_kv_heads": cache.num_kv_heads,
        "head_dim": cache.head_dim,
        "page_size": cache.config.page_size,
        "layout": LAYOUT,
        "kv_dtype": str(cache.dtype).removeprefix("torch."),
        "scorer": resolve(cache.config.scorer, cache.config.page_size, cache.dtype),
        "layer_groups": [list(group) for group in cache.layer_groups],
    }


def _parse(data: bytes) -> tuple[dict[str, Any], memoryview]:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"data: expected bytes, got {type(data).__name__}")
    view = memoryview(data).cast("B")
    if len(view) < _PREFIX.size:
        raise ValueError(f"data: expected an exported cache, got {len(view)} bytes")
    magic, version, _, header_bytes = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise ValueError(f"magic: expected {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise ValueError(f"version: expected {VERSION}, got {version}")
    end = _PREFIX.size + header_bytes
    if end > len(view):
        raise ValueError(f"data: expected a header of {header_bytes} bytes, got {len(view) - _PREFIX.size}")
    try:
        header = json.loads(bytes(view[_PREFIX.size : end]))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"header: expected JSON, got {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"header: expected a JSON object, got {type(header).__name__}")
    return header, view[end + -end % _ALIGNMENT :]


def _check_counts(value: Any, num_groups: int) -> list[int]:
    if not isinstance(value, list) or len(value) != num_groups or not all(_is_count(n) for n in value):
        raise ValueError(f"num_pages: expected {num_groups} counts, got {value!r}")
    return value


def _check_sequences(value: Any, num_pages: list[int], page_size: int) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"sequences: expected a list, got {type(value).__name__}")
    for index, entry in enumerate(value):
        where = f"sequences[{index}]"
        if not isinstance(entry, dict) or not all(
            _is_count(entry.get(n)) for n in ("length", "next_position")
        ):
            raise ValueError(f"{where}: expected length and next_position, got {entry!r}")
        pages = entry.get("pages")
        if not isinstance(pages, list) or len(pages) != len(num_pages):
            raise ValueError(f"{where}: expected pages of {len(num_pages)} layer groups, got {pages!r}")
        for group_pages, count in zip(pages, num_pages, strict=True):
            if not isinstance(group_pages, list) or len(group_pages) != -(-entry["length"] // page_size):
                raise ValueError(
                    f"{where}: expected the pages of {entry['length']} tokens, got {group_pages!r}"
                )
            if not all(_is_count(page) and page < count for page in group_pages):
                raise ValueError(f"{where}: expected pages below {count}, got {group_pages!r}")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _payload_bytes(cache: PagedKVCache, num_pages: list[int]) -> int:
    total = 0
    for layer_idx, pool in enumerate(cache.pool.layers):
        for shape, dtype in _shapes(pool, num_pages[cache.group_of_layer[layer_idx]]):
            total += -(-_num_bytes(shape, dtype) // _ALIGNMENT) * _ALIGNMENT
    return total


def _check_payload(header: dict[str, Any], payload: memoryview, expected: int) -> None:
    if header.get("payload_bytes") != expected:
        raise ValueError(f"payload_bytes: expected {expected}, got {header.get('payload_bytes')!r}")
    if len(payload) != expected:
        raise ValueError(f"data: expected {expected} bytes of tensors, got {len(payload)}")
    checksum = zlib.crc32(payload)
    if header.get("payload_crc32") != checksum:
        raise ValueError(
            f"payload_crc32: expected {header.get('payload_crc32')!r}, got {checksum}; the data is damaged"
        )


def _read_layers(cache: PagedKVCache, num_pages: list[int], payload: memoryview) -> list[list[torch.Tensor]]:
    """K, V, scales and summaries of each layer, as `_shapes`."""
    layers = []
    offset = 0
    for layer_idx, pool in enumerate(cache.pool.layers):
        parts = []
        for shape, dtype in _shapes(pool, num_pages[cache.group_of_layer[layer_idx]]):
            num_bytes = _num_bytes(shape, dtype)
            if num_bytes == 0:  # only empty sequences: torch does not reinterpret an empty tensor
                parts.append(torch.empty(shape, dtype=dtype, device=cache.device))
                continue
            array = numpy.frombuffer(payload[offset : offset + num_bytes], dtype=numpy.uint8).copy()
            parts.append(torch.from_numpy(array).view(dtype).view(shape).to(cache.device))
            offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        layers.append(parts)
    return layers


def _restore(
    cache: PagedKVCache,
    handles: list[int],
    entries: list[dict[str, Any]],
    index: int,
    layers: list[list[torch.Tensor]],
) -> None:
    """Appends the handle of `entries[index]`; leading pages of an earlier entry are shared again."""
    entry = entries[index]
    source, shared_len = _longest_shared(entries, index, cache.config.page_size)
    handles.append(cache.fork(handles[source]) if shared_len else cache.new_sequence())
    handle = handles[-1]
    if shared_len:
        cache.crop(handle, shared_len)
    forward = cache.begin([(handle, entry["length"] - shared_len)])
    first_page = shared_len // cache.config.page_size
    tables = [forward.page_table(group)[0] for group in range(len(cache.layer_groups))]
    for layer_idx, (pool, parts) in enumerate(zip(cache.pool.layers, layers, strict=True)):
        group = cache.group_of_layer[layer_idx]
        file_pages = torch.tensor(entry["pages"][group][first_page:], dtype=torch.int64, device=cache.device)
        if forward.num_tokens == 0:
            break
        target = tables[group][first_page : first_page + file_pages.numel()].contiguous()
        k, v, *scales, summary = (part[file_pages] for part in parts)
        k_scales, v_scales = scales if scales else (None, None)
        with torch.no_grad():
            ops.scatter_pages(target, k, v, k_scales, v_scales, summary, *pool.parts)
    forward.commit(allow_missing_layers=True)
    cache.set_next_position(handle, entry["next_position"])


def _longest_shared(entries: list[dict[str, Any]], index: int, page_size: int) -> tuple[int, int]:
    """The earlier entry that shares most leading tokens with `entries[index]`, and how many."""
    entry = entries[index]
    best = (0, 0)
    for source in range(index):
        num_pages = min(
            _common_prefix(ours, theirs)
            for ours, theirs in zip(entry["pages"], entries[source]["pages"], strict=True)
        )
        tokens = min(num_pages * page_size, entry["length"], entries[source]["length"])
        if tokens > best[1]:
            best = (source, tokens)
    return best


def _common_prefix(ours: list[int], theirs: list[int]) -> int:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return min(len(ours), len(theirs))


def _shapes(pool: LayerPool, num_pages: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """K, V, their scales if they are int8, and summaries of `num_pages` pages of a layer, in the file's
    order.
    """
    pages = (num_pages, pool.num_kv_heads, pool.page_size, pool.head_dim)
    scales = [(pages[:3], torch.float32)] * 2 if pool.dtype == torch.int8 else []
    summaries = ((num_pages, pool.num_kv_heads, pool.summary_bytes), torch.uint8)
    return [(pages, pool.dtype), (pages, pool.dtype), *scales, summaries]


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    total = dtype.itemsize
    for size in shape:
        total *= size
    return total


def _gather(pool: LayerPool, page_ids: torch.Tensor, used: list[int]) -> list[torch.Tensor]:
    with torch.no_grad():
        *by_token, summary = ops.gather_pages(page_ids, *pool.parts)
        by_token = [part for part, pages in zip(by_token, pool.parts, strict=False) if pages is not None]
        for index, tokens in enumerate(used):
            if tokens < pool.page_size:
                for part in by_token:
                    part[index, :, tokens:] = 0
                summary[index] = 0  # an open page has none yet
    return [*by_token, summary]


def _to_bytes(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return data
