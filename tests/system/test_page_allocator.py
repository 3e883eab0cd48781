"""The page allocator as Python sees it: types and errors at the boundary, and random call orders (hypothesis)
against a model that keeps every sequence's tokens in a list and every page's slots in another. What the page
tables lead to must be those tokens after every call, and no page may be lost or owned twice.
"""

from __future__ import annotations

import ast
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tinyserve_ops import _runtime
from tinyserve_ops._runtime import PageAllocator

PAGE_SIZE = 4
NUM_PAGES = 8


def sequence_of(allocator: PageAllocator, length: int) -> int:
    sequence_id = allocator.new_sequence()
    assert allocator.try_reserve([sequence_id], [length]) == []
    allocator.commit(sequence_id, length)
    return sequence_id


def test_page_ids_are_an_independent_int32_copy() -> None:
    allocator = PageAllocator(num_pages=4, page_size=16)
    sequence_id = sequence_of(allocator, 33)
    page_ids = allocator.page_ids(sequence_id)
    assert page_ids.dtype == np.int32
    assert page_ids.tolist() == [0, 1, 2]
    page_ids[:] = -1
    assert allocator.page_ids(sequence_id, start=1).tolist() == [1, 2]
    assert allocator.page_ids(sequence_id, start=3).shape == (0,)


def test_reserve_answers_none_when_pages_run_out_and_pairs_when_pages_must_be_copied() -> None:
    allocator = PageAllocator(4, 16)
    first = sequence_of(allocator, 20)
    second = allocator.fork(first)
    assert allocator.try_reserve([first], [60]) is None
    assert allocator.try_reserve([first, second], [1, 1]) == [(1, 2)]
    assert allocator.try_reserve([], []) == []
    allocator.check()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda a, s: PageAllocator(-1, 16), ValueError, r"num_pages: expected .*, got -1"),
        (lambda a, s: PageAllocator(4, 0), ValueError, r"page_size: expected .*, got 0"),
        (lambda a, s: a.grow(3), ValueError, r"num_pages: expected a new total of at least 4, got 3"),
        (lambda a, s: a.length(7), IndexError, r"sequence_id: expected a live sequence, got 7"),
        (lambda a, s: a.page_ids(s, 3), IndexError, r"start: expected a value in \[0, 2\], got 3"),
        (lambda a, s: a.pin(4), IndexError, r"page_id: expected a value in \[0, 4\), got 4"),
        (lambda a, s: a.pin(3), ValueError, r"page_id: expected a used or cached page, got 3, which is free"),
        (lambda a, s: a.unpin(0), ValueError, r"page_id: expected a pinned page, got 0"),
        (lambda a, s: a.commit(s, 1), ValueError, r"num_new: expected .* has reserved, got 1"),
        (lambda a, s: a.crop(s, 21), ValueError, r"length: expected a value in \[0, 20\], got 21"),
        (lambda a, s: a.try_reserve([s, s], [1, 1]), ValueError, r"sequence_ids: expected each"),
        (lambda a, s: a.try_reserve([s], []), ValueError, r"num_new: expected 1 values, .* got 0"),
        (lambda a, s: a.register_page(s, 1, b"k", range(16)), ValueError, r"page_idx: expected one of the 1"),
        (lambda a, s: a.register_page(s, 0, b"k", range(15)), ValueError, r"tokens: expected .*16.*, got 15"),
        (lambda a, s: a.register_page(s, 2, b"k", range(16)), IndexError, r"page_idx: expected .*, got 2"),
        (lambda a, s: a.attach_cached(s, b"k", range(16)), ValueError, r"length is its capacity"),
        (lambda a, s: a.register_page(s, 0, "text", range(16)), TypeError, r"key: bytes"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected_and_changes_nothing(call, error, text) -> None:
    allocator = PageAllocator(4, 16)
    sequence_id = sequence_of(allocator, 20)
    with pytest.raises(error, match=text):
        call(allocator, sequence_id)
    assert (allocator.length(sequence_id), allocator.num_used, allocator.num_free) == (20, 2, 2)
    allocator.check()


def test_keys_may_hold_any_bytes_and_tokens_any_sequence_of_ints() -> None:
    allocator = PageAllocator(4, 16)
    sequence_id = sequence_of(allocator, 32)
    assert allocator.register_page(sequence_id, 0, b"\0\xff\0a", np.arange(16))
    assert allocator.register_page(sequence_id, 1, b"\0\xff\0b", list(range(16)))
    other = allocator.new_sequence()
    assert not allocator.attach_cached(other, b"\0", range(16))
    assert allocator.attach_cached(other, b"\0\xff\0b", range(16))
    assert allocator.page_ids(other).tolist() == [1]


def test_python_threads_share_one_allocator() -> None:
    allocator = PageAllocator(64, 16)
    shared = sequence_of(allocator, 24)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(100):
                sequence_id = allocator.fork(shared)
                assert allocator.try_reserve([sequence_id], [30]) is not None
                allocator.commit(sequence_id, 30)
                allocator.check()
                allocator.free_sequence(sequence_id)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert allocator.num_used == 2


def test_the_cpu_target_in_use_is_one_that_the_machine_can_run() -> None:
    assert _runtime.cpu_target() in _runtime.available_cpu_targets()
    assert "scalar" in _runtime.available_cpu_targets()


def test_the_type_stub_names_what_the_compiled_module_has() -> None:
    def public(names: Iterable[str]) -> set[str]:
        return {name for name in names if not name.startswith("_")}

    module = ast.parse(Path(_runtime.__file__).with_name("_runtime.pyi").read_text())
    definitions = {d.name: d for d in module.body if isinstance(d, ast.FunctionDef | ast.ClassDef)}
    methods = [d.name for d in definitions["PageAllocator"].body if isinstance(d, ast.FunctionDef)]
    assert public(definitions) == public(dir(_runtime))
    assert public(methods) == public(dir(PageAllocator))


class AnyOrderOfCalls(RuleBasedStateMachine):
    """`slots[page][i]` is the pool's content, `tokens[sequence]` what the sequence must read."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES, PAGE_SIZE)
        self.slots = [[-1] * PAGE_SIZE for _ in range(NUM_PAGES)]
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, tuple[int, list[int]]] = {}
        self.pins: Counter[int] = Counter()
        self.keys: list[tuple[int, ...]] = []

    def held(self) -> set[int]:
        return set(+self.pins).union(*(self.allocator.page_ids(s).tolist() for s in self.tokens))

    @rule(target=sequences)
    def start(self) -> int:
        sequence_id = self.allocator.new_sequence()
        self.tokens[sequence_id] = []
        return sequence_id

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: int) -> int:
        sequence_id = self.allocator.fork(parent)
        self.tokens[sequence_id] = list(self.tokens[parent])
        return sequence_id

    @rule(sequence_id=consumes(sequences))
    def end(self, sequence_id: int) -> None:
        self.allocator.free_sequence(sequence_id)
        del self.tokens[sequence_id]
        self.tables.pop(sequence_id, None)

    @rule(sequence_id=sequences, data=st.data())
    def crop(self, sequence_id: int, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.tokens[sequence_id])))
        self.allocator.crop(sequence_id, length)
        del self.tokens[sequence_id][length:]

    @rule(sequence_id=sequences)
    def reset(self, sequence_id: int) -> None:
        self.allocator.reset(sequence_id)
        self.tokens[sequence_id].clear()

    @rule(sequence_id=sequences)
    def trim(self, sequence_id: int) -> None:
        self.allocator.trim(sequence_id)
        num_needed = -(-len(self.tokens[sequence_id]) // PAGE_SIZE)
        assert self.allocator.num_pages_of(sequence_id) == num_needed

    @rule(
        batch=st.dictionaries(sequences, st.lists(st.integers(0, 1), max_size=2 * PAGE_SIZE), max_size=3),
        num_rejected=st.integers(0, 2),
    )
    def step(self, batch: dict[int, list[int]], num_rejected: int) -> None:
        allocator, held = self.allocator, self.held()
        before = {s: allocator.page_ids(s).tolist() for s in batch}
        copies = allocator.try_reserve(list(batch), [len(new) for new in batch.values()])
        if copies is None:
            assert {s: allocator.page_ids(s).tolist() for s in batch} == before
            assert self.held() == held
            return
        for src, dst in copies:
            assert dst not in held
            self.slots[dst] = list(self.slots[src])
        for sequence_id, new in batch.items():
            page_ids, length = allocator.page_ids(sequence_id).tolist(), len(self.tokens[sequence_id])
            assert not (set(page_ids) - set(before[sequence_id])) & held
            for position, token in enumerate(new, start=length):
                self.slots[page_ids[position // PAGE_SIZE]][position % PAGE_SIZE] = token
            num_accepted = max(0, len(new) - num_rejected)
            allocator.commit(sequence_id, num_accepted)
            self.tokens[sequence_id] += new[:num_accepted]

    @rule(sequence_id=sequences, data=st.data())
    def register(self, sequence_id: int, data: st.DataObject) -> None:
        num_sealed = len(self.tokens[sequence_id]) // PAGE_SIZE
        if num_sealed == 0:
            return
        page_idx = data.draw(st.integers(0, num_sealed - 1))
        key = tuple(self.tokens[sequence_id][: (page_idx + 1) * PAGE_SIZE])
        if self.allocator.register_page(sequence_id, page_idx, bytes(key), key[-PAGE_SIZE:]):
            self.keys.append(key)

    @precondition(lambda self: self.keys)
    @rule(sequence_id=sequences, data=st.data())
    def attach(self, sequence_id: int, data: st.DataObject) -> None:
        if len(self.tokens[sequence_id]) != self.allocator.capacity(sequence_id):
            return
        key = data.draw(st.sampled_from(self.keys))
        if self.allocator.attach_cached(sequence_id, bytes(key), key[-PAGE_SIZE:]):
            self.tokens[sequence_id] += key[-PAGE_SIZE:]

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        if held := sorted(self.held()):
            page_id = data.draw(st.sampled_from(held))
            self.allocator.pin(page_id)
            self.pins[page_id] += 1

    @precondition(lambda self: +self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        page_id = data.draw(st.sampled_from(sorted(+self.pins)))
        self.allocator.unpin(page_id)
        self.pins[page_id] -= 1

    @precondition(lambda self: self.allocator.num_pages < 2 * NUM_PAGES)
    @rule()
    def grow(self) -> None:
        self.allocator.grow(self.allocator.num_pages + 1)
        self.slots.append([-1] * PAGE_SIZE)

    @invariant()
    def pages_are_conserved(self) -> None:
        allocator = self.allocator
        allocator.check()
        assert allocator.num_free + allocator.num_cached + allocator.num_used == allocator.num_pages
        assert allocator.num_used == len(self.held())
        references = Counter(page_id for s in self.tokens for page_id in allocator.page_ids(s).tolist())
        for page_id in range(allocator.num_pages):
            assert allocator.ref_count(page_id) == references[page_id]
            assert allocator.pin_count(page_id) == self.pins[page_id]

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence_id, tokens in self.tokens.items():
            page_ids = self.allocator.page_ids(sequence_id).tolist()
            read = [token for page_id in page_ids for token in self.slots[page_id]]
            assert read[: self.allocator.length(sequence_id)] == tokens

    @invariant()
    def a_version_stands_for_entries_that_stay(self) -> None:
        for sequence_id in self.tokens:
            version = self.allocator.page_table_version(sequence_id)
            page_ids = self.allocator.page_ids(sequence_id).tolist()
            seen_version, seen_page_ids = self.tables.get(sequence_id, (version, []))
            assert (version == seen_version) == (page_ids[: len(seen_page_ids)] == seen_page_ids)
            self.tables[sequence_id] = (version, page_ids)


AnyOrderOfCalls.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
