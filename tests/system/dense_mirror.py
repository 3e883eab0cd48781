"""An independent picture of a paged cache: every key and value in plain tensors, attention in float64 over
them.

Knows nothing of pages except, where a test asks, which tokens a list of pages covers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tinyserve_ops import PagedKVCache
from tinyserve_ops.testing import as_stored

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 3, 4, 2, 16
SM_SCALE = HEAD_DIM**-0.5


def new_cache(**options: object) -> PagedKVCache:
    """A cache of the shape that this module uses everywhere."""
    options.setdefault("max_tokens", 256)
    return PagedKVCache(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, **options)  # type: ignore[arg-type]


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int = -1,
    pages: torch.Tensor | None = None,
    page_size: int = 1,
) -> torch.Tensor:
    """Attention of q [T, Hq, D], the last T positions of k, v [n, Hkv, D]; `pages` [Hkv, m] for T = 1."""
    num_new, num_heads, _ = q.shape
    group = num_heads // k.size(1)
    length = k.size(0)
    positions = torch.arange(length - num_new, length)[:, None]
    keys = torch.arange(length)[None]
    visible = keys <= positions
    if window > 0:
        visible &= keys > positions - window
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(num_heads):
        kv_head = head // group
        allowed = visible
        if pages is not None:
            allowed = visible & torch.isin(keys // page_size, pages[kv_head])
        logits = (q[:, head].double() @ k[:, kv_head].double().T) * SM_SCALE
        out[:, head] = torch.softmax(logits.masked_fill(~allowed, -torch.inf), -1) @ v[:, kv_head].double()
    return out


@dataclass
class DenseMirror:
    """Drives a cache with random tensors and keeps what it was given, by sequence and layer."""

    cache: PagedKVCache
    seed: int = 42
    dtype: torch.dtype = torch.float32
    tokens: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def random(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, HEAD_DIM, generator=self.generator).to(self.dtype)

    def new(self, num_tokens: int = 0) -> int:
        """A new sequence, filled in one forward."""
        seq = self.cache.new_sequence()
        self.tokens[seq] = [
            (self.random(0, NUM_KV_HEADS), self.random(0, NUM_KV_HEADS)) for _ in range(NUM_LAYERS)
        ]
        if num_tokens:
            self.step([(seq, num_tokens)])
        return seq

    def fork(self, seq: int) -> int:
        forked = self.cache.fork(seq)
        self.tokens[forked] = list(self.tokens[seq])
        return forked

    def crop(self, seq: int, length: int) -> None:
        self.cache.crop(seq, length)
        self.tokens[seq] = [(k[:length], v[:length]) for k, v in self.tokens[seq]]

    def as_read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Keys or values as the pages give them back."""
        return as_stored(tokens) if self.cache.dtype == torch.int8 else tokens

    def step(
        self, batch: list[tuple[int, int]], *, window: int = -1, check: bool = True, tolerance: float = 1e-5
    ) -> list[torch.Tensor]:
        """One committed forward; compares every row of every layer with full attention when `check`."""
        forward = self.cache.begin(batch)
        outs = []
        for layer in range(NUM_LAYERS):
            total = forward.num_tokens
            q, k, v = (
                self.random(total, NUM_HEADS),
                self.random(total, NUM_KV_HEADS),
                self.random(total, NUM_KV_HEADS),
            )
            outs.append(forward.attend(layer, q, k, v, SM_SCALE, window))
            start = 0
            for seq, num_new in batch:
                rows = slice(start, start + num_new)
                old_k, old_v = self.tokens[seq][layer]
                k_now, v_now = torch.cat([old_k, k[rows]]), torch.cat([old_v, v[rows]])
                self.tokens[seq][layer] = (k_now, v_now)
                if check and num_new:
                    # One new token is read from the pages, several are attended to as they were given.
                    new_k, new_v = (self.as_read(new[rows]) if num_new == 1 else new[rows] for new in (k, v))
                    keys = torch.cat([self.as_read(old_k), new_k])
                    expected = oracle(q[rows], keys, torch.cat([self.as_read(old_v), new_v]), window)
                    # Over int8 pages one new token's query and probabilities are rounded to 16 bits: 2^-16 of
                    # each of a page's values, and twice 2^-16 of the products that a logit sums.
                    magnitudes = q[rows].abs().amax() * keys.abs().sum(-1).amax() * SM_SCALE
                    rounded = (2 * magnitudes + 16) * 2.0**-16 if self.cache.dtype == torch.int8 else 0.0
                    torch.testing.assert_close(
                        outs[layer][rows].double(),
                        expected,
                        rtol=tolerance,
                        atol=tolerance + float(rounded) * float(v_now.abs().max()),
                        msg=f"layer {layer} seq {seq}",
                    )
                start += num_new
        forward.commit()
        return outs

    def assert_contents(self, seq: int) -> None:
        """The cache holds exactly these keys and values, bit for bit."""
        assert self.cache.length(seq) == self.tokens[seq][0][0].size(0)
        for layer in range(NUM_LAYERS):
            for got, expected in zip(self.cache.dense(layer, seq), self.tokens[seq][layer], strict=True):
                assert torch.equal(got, self.as_read(expected).to(got.dtype).transpose(0, 1))
