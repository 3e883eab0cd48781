// Python bindings of the page allocator and of the CPU target in use. Nothing is decided here: arguments are
// converted while the GIL is held, and it is released before any lock is taken, so that the two can never
// wait for each other. std::invalid_argument arrives as ValueError, std::out_of_range as IndexError,
// std::runtime_error as RuntimeError.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/cpu_target.h"
#include "runtime/page_allocator.h"

namespace py = pybind11;

namespace {

using tinyserve::runtime::PageAllocator;
using Ints = std::vector<int64_t>;
using Unlocked = py::call_guard<py::gil_scoped_release>;

template <typename Getter>
void def_property(py::class_<PageAllocator>& type, const char* name, Getter getter, const char* doc) {
  type.def_property_readonly(name, py::cpp_function(getter, Unlocked()), doc);
}

py::array_t<int32_t> page_ids(const PageAllocator& self, int64_t sequence_id, int64_t start) {
  std::vector<int32_t> pages;
  {
    const py::gil_scoped_release unlocked;
    pages = self.page_ids(sequence_id, start);
  }
  py::array_t<int32_t> out(static_cast<py::ssize_t>(pages.size()));
  std::ranges::copy(pages, out.mutable_data());
  return out;
}

std::optional<std::vector<std::tuple<int32_t, int32_t>>> try_reserve(PageAllocator& self,
                                                                     const Ints& sequence_ids,
                                                                     const Ints& num_new) {
  const auto copies = self.try_reserve(sequence_ids, num_new);
  if (!copies) return std::nullopt;
  std::vector<std::tuple<int32_t, int32_t>> pairs;
  pairs.reserve(copies->size());
  for (const auto& copy : *copies) pairs.emplace_back(copy.src, copy.dst);
  return pairs;
}

bool register_page(PageAllocator& self, int64_t sequence_id, int64_t page_idx, const py::bytes& key,
                   const Ints& tokens) {
  std::string content_key = key;
  const py::gil_scoped_release unlocked;
  return self.register_page(sequence_id, page_idx, std::move(content_key), tokens);
}

bool attach_cached(PageAllocator& self, int64_t sequence_id, const py::bytes& key, const Ints& tokens) {
  const std::string content_key = key;
  const py::gil_scoped_release unlocked;
  return self.attach_cached(sequence_id, content_key, tokens);
}

void bind_pool(py::class_<PageAllocator>& type) {
  def_property(type, "num_pages", &PageAllocator::num_pages, "Pages of the pool; free + cached + used.");
  def_property(type, "page_size", &PageAllocator::page_size, "Tokens per page.");
  def_property(type, "num_free", &PageAllocator::num_free,
               "Pages without holder and without registered content.");
  def_property(type, "num_cached", &PageAllocator::num_cached,
               "Registered pages without holder: evicted, least recently used first, once no page is free.");
  def_property(type, "num_used", &PageAllocator::num_used, "Pages in a page table, or pinned.");
  def_property(type, "num_sequences", &PageAllocator::num_sequences, "Live sequences.");
  type.def("grow", &PageAllocator::grow, py::arg("num_pages"), Unlocked(),
           "Enlarge the pool to `num_pages` in total. Page ids in use stay as they are.");
  type.def("pin", &PageAllocator::pin, py::arg("page_id"), Unlocked(),
           "Keep a used or cached page from being freed, evicted or given out until as many unpins.");
  type.def("unpin", &PageAllocator::unpin, py::arg("page_id"), Unlocked(), "Take back one pin.");
  type.def("ref_count", &PageAllocator::ref_count, py::arg("page_id"), Unlocked(),
           "Entries in page tables that name the page (pins are not counted).");
  type.def("pin_count", &PageAllocator::pin_count, py::arg("page_id"), Unlocked(), "Pins on the page.");
  type.def("check", &PageAllocator::check, Unlocked(),
           "Verify every invariant from scratch.\n\nRaises RuntimeError naming the broken one.");
}

void bind_sequences(py::class_<PageAllocator>& type) {
  type.def("new_sequence", &PageAllocator::new_sequence, Unlocked(),
           "Id of a new, empty sequence; never given twice.");
  type.def("fork", &PageAllocator::fork, py::arg("sequence_id"), Unlocked(),
           "Id of a new sequence that shares every page. Both must reserve again before they write.");
  type.def("free_sequence", &PageAllocator::free_sequence, py::arg("sequence_id"), Unlocked(),
           "End a sequence; pages that nobody else holds become cached (if registered) or free.");
  type.def("length", &PageAllocator::length, py::arg("sequence_id"), Unlocked(), "Committed tokens.");
  type.def("capacity", &PageAllocator::capacity, py::arg("sequence_id"), Unlocked(),
           "Slots: pages * page_size.");
  type.def("num_pages_of", &PageAllocator::num_pages_of, py::arg("sequence_id"), Unlocked(),
           "Pages in the page table, reserved ones included.");
  type.def("page_ids", &page_ids, py::arg("sequence_id"), py::arg("start") = 0,
           "int32 [num_pages_of - start]: a copy of the page table from logical page `start` on.");
  type.def("page_table_version", &PageAllocator::page_table_version, py::arg("sequence_id"), Unlocked(),
           "Grows whenever an entry of the page table changes or is removed; not when entries are appended.");
}

void bind_steps(py::class_<PageAllocator>& type) {
  type.def(
      "try_reserve", &try_reserve, py::arg("sequence_ids"), py::arg("num_new"), Unlocked(),
      R"(Make `num_new[i]` slots after the length of `sequence_ids[i]` writable, for all of them or for none.

Appends pages and replaces pages that other sequences share (copy-on-write).

Returns: (src, dst) page ids to copy before writing, in any order (destinations are distinct, never a source);
    None when free and cached pages do not suffice, with nothing changed.
Raises: ValueError for a sequence given twice or a count out of range, IndexError for an unknown sequence.)");
  type.def("commit", &PageAllocator::commit, py::arg("sequence_id"), py::arg("num_new"), Unlocked(),
           "Add written tokens to the length. Raises ValueError if they were not reserved.");
  type.def(
      "crop", &PageAllocator::crop, py::arg("sequence_id"), py::arg("length"), Unlocked(),
      "Shorten to `length`, end an open reservation, give back all pages past ceil(length / page_size).");
  type.def("reset", &PageAllocator::reset, py::arg("sequence_id"), Unlocked(), "Same as crop to 0.");
  type.def("trim", &PageAllocator::trim, py::arg("sequence_id"), Unlocked(),
           "Give back reserved pages that hold no committed token.");
}

void bind_prefix_cache(py::class_<PageAllocator>& type) {
  type.def("register_page", &register_page, py::arg("sequence_id"), py::arg("page_idx"), py::arg("key"),
           py::arg("tokens"),
           R"(Register a page full of committed tokens under the key of its content.

Args:
    key: bytes that identify all that the page's keys and values depend on, earlier pages included.
    tokens: the page_size tokens of the page; compared on every hit, so colliding keys are harmless.
Returns: True if the page now stands for this key and these tokens; False, with nothing changed, when the key
    already belongs to another page or the page to another key or other tokens.
Raises: IndexError for an unknown sequence or page, ValueError for a page that is not full.)");
  type.def(
      "attach_cached", &attach_cached, py::arg("sequence_id"), py::arg("key"), py::arg("tokens"),
      R"(Append the page registered under `key` if its tokens are `tokens`; the length grows by page_size.

Returns: False on a miss, with nothing changed.
Raises: ValueError unless the sequence ends at a page boundary with no page in reserve.)");
}

}  // namespace

PYBIND11_MODULE(_runtime, m, py::mod_gil_not_used()) {
  m.doc() =
      "Page allocator of the paged KV cache, and the CPU target of the kernels. Integers only, no tensors.";

  py::class_<PageAllocator> type(m, "PageAllocator",
                                 R"(Page tables over a pool of `num_pages` pages of `page_size` tokens.

Reference counts, copy-on-write, all-or-nothing reservations, pins, and an LRU cache of registered pages.
A call that raises changes nothing. Every method may be called from any thread.)");
  type.def(py::init<int64_t, int64_t>(), py::arg("num_pages"), py::arg("page_size"));
  bind_pool(type);
  bind_sequences(type);
  bind_steps(type);
  bind_prefix_cache(type);

  m.def("cpu_target", &tinyserve::core::cpu_target_name,
        "Name of the CPU target that the kernels of this process use.");
  m.def("available_cpu_targets", &tinyserve::core::available_cpu_targets,
        "Names of the CPU targets that this build has and this machine can run, plainest first.");
}
