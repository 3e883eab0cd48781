// A batch of sequences in paged pools, for every kernel test: random tokens behind shuffled page ids, NaN in
// every slot that holds no token, and query rows cut out of wider tensors. The plain tokens stay at hand for
// the oracles; those of int8 pages are drawn as a scale and codes, so they are what the pages hold. A page
// that no row may look at has page id -1, which leads to memory that must not be read.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <ostream>
#include <random>
#include <vector>

#include "core/params.h"
#include "elements.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, size) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(begin, size) static_cast<void>(0)
#endif

namespace tinyserve::cpu::testing {

struct Shape {
  ElementType type = ElementType::kFloat32;  // of the pages
  int64_t page_size = 16;
  int64_t head_dim = 64;
  int64_t group_size = 3;
  bool channel_major = false;
  int64_t window = -1;
  int64_t num_kv_heads = 2;

  // Of queries, results and new tokens.
  ElementType query_type() const { return type == ElementType::kInt8 ? ElementType::kFloat32 : type; }
  int64_t num_heads() const { return num_kv_heads * group_size; }
  float sm_scale() const { return 1.0F / std::sqrt(static_cast<float>(head_dim)); }
};

inline std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "type " << static_cast<int>(s.type) << ", page_size " << s.page_size << ", head_dim "
             << s.head_dim << ", group_size " << s.group_size << ", channel_major " << s.channel_major
             << ", window " << s.window;
}

// 64 shapes in which every two values of type, page size, layout, head dim, group size and window meet (but
// for one pair of page and group size); the first 32 have every triple of type, page size and layout. Fewer
// under ThreadSanitizer, which is slow and looks at threads, not at numbers.
inline std::vector<Shape> covering_shapes(int count = 64) {
  constexpr int64_t kPageSizes[] = {1, 7, 16, 64};
  constexpr int64_t kHeadDims[] = {8, 40, 64, 128, 256};
  constexpr int64_t kGroupSizes[] = {1, 3, 4, 5, 7, 9};
  constexpr int64_t kWindows[] = {-1, 5, 90, 1};
#if defined(__SANITIZE_THREAD__)
  count = std::min(count, 16);
#endif
  std::vector<Shape> shapes;
  for (int i = 0; i < count; ++i) {
    shapes.push_back({.type = kPageTypes[i % 4],
                      .page_size = kPageSizes[i / 4 % 4],
                      .head_dim = kHeadDims[i % 5],
                      .group_size = kGroupSizes[i * 7 / 5 % 6],
                      .channel_major = i / 16 % 2 == 1,
                      .window = kWindows[i * 3 / 7 % 4]});
  }
  return shapes;
}

struct Sequence {
  int64_t length;
  int64_t num_new = 0;  // the last of them, not in the pages yet
};

struct RowAt {
  int32_t sequence;
  int64_t position;
};

class PagedProblem {
 public:
  PagedProblem(const Shape& wanted, std::vector<Sequence> batch, std::vector<RowAt> places, uint32_t seed)
      : shape(wanted), sequences(std::move(batch)), row_places(std::move(places)), random_(seed) {
    fill_choices();
    lay_out_pools();
    int32_t next = 0;
    page_tables.resize(sequences.size());
    for (size_t s = 0; s < sequences.size(); ++s) {
      const int64_t num_vectors = shape.num_kv_heads * sequences[s].length;
      keys_.push_back(draw(num_vectors));
      values_.push_back(draw(num_vectors));
      page_tables[s].resize(num_pages_of(s));
      for (int32_t& page_id : page_tables[s]) page_id = page_ids_[next++];
      write_pages(s);
      hide_unseen_pages(s);
    }
    make_queries();
    for (const RowAt& row : row_places) {
      rows.push_back(
          core::make_row(page_tables[row.sequence].data(), row.sequence, row.position, shape.window));
    }
  }
  ~PagedProblem() {
    ASAN_UNPOISON_MEMORY_REGION(k_storage_.data(), k_storage_.bytes().size());
    ASAN_UNPOISON_MEMORY_REGION(v_storage_.data(), v_storage_.bytes().size());
    ASAN_UNPOISON_MEMORY_REGION(k_scales_.data(), k_scales_.size() * sizeof(float));
    ASAN_UNPOISON_MEMORY_REGION(v_scales_.data(), v_scales_.size() * sizeof(float));
  }
  PagedProblem(const PagedProblem&) = delete;
  PagedProblem& operator=(const PagedProblem&) = delete;

  Shape shape;
  std::vector<Sequence> sequences;
  std::vector<RowAt> row_places;
  std::vector<core::Row> rows;
  std::vector<std::vector<int32_t>> page_tables;
  core::PagePoolView k_pages;
  core::PagePoolView v_pages;
  core::PackedView q;
  int64_t num_pages = 0;

  int64_t num_rows() const { return static_cast<int64_t>(rows.size()); }
  int64_t num_pages_of(size_t s) const {
    return (sequences[s].length + shape.page_size - 1) / shape.page_size;
  }
  const float* key(int64_t s, int64_t head, int64_t token) const {
    return keys_[s].numbers.data() + (head * sequences[s].length + token) * shape.head_dim;
  }
  const float* value(int64_t s, int64_t head, int64_t token) const {
    return values_[s].numbers.data() + (head * sequences[s].length + token) * shape.head_dim;
  }
  std::vector<double> query(int64_t row, int64_t query_head) const {
    std::vector<double> out(static_cast<size_t>(shape.head_dim));
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      out[d] = q_storage_.get(row * q.token_stride + query_head * q.head_stride + d);
    }
    return out;
  }
  void set_query(int64_t row, int64_t query_head, int64_t d, double x) {
    q_storage_.set(row * q.token_stride + query_head * q.head_stride + d, x);
  }
  bool sees(int64_t row, int64_t token) const {
    const int64_t position = row_places[row].position;
    return token <= position && (shape.window <= 0 || token > position - shape.window);
  }
  // Where one element of the K (or V) pages lies, in elements from the pool's begin.
  int64_t offset(const core::PagePoolView& pool, int64_t page_id, int64_t head, int64_t slot,
                 int64_t d) const {
    return page_id * pool.page_stride + head * pool.head_stride + slot * pool.token_stride +
           d * pool.channel_stride;
  }
  void set_key(int64_t s, int64_t head, int64_t token, int64_t d, double x) {
    keys_[s].numbers[(head * sequences[s].length + token) * shape.head_dim + d] = static_cast<float>(x);
    k_storage_.set(
        guard_ + offset(k_pages, page_tables[s][token / shape.page_size], head, token % shape.page_size, d),
        x);
  }
  // Not for int8 pages.
  void set_value(int64_t s, int64_t head, int64_t token, int64_t d, double x) {
    values_[s].numbers[(head * sequences[s].length + token) * shape.head_dim + d] = static_cast<float>(x);
    v_storage_.set(
        guard_ + offset(v_pages, page_tables[s][token / shape.page_size], head, token % shape.page_size, d),
        x);
  }
  // Replaces a key vector; in int8 pages by the nearest one of its scale, largest magnitude / 127. One that
  // is not finite becomes NaN there.
  void set_key_row(int64_t s, int64_t head, int64_t token, const std::vector<double>& row) {
    if (shape.type != ElementType::kInt8) {
      for (int64_t d = 0; d < shape.head_dim; ++d) set_key(s, head, token, d, row[d]);
      return;
    }
    float amax = 0.0F;
    for (const double x : row) {
      amax = std::isfinite(x) ? std::max(amax, std::fabs(static_cast<float>(x))) : kNanFloat;
      if (std::isnan(amax)) break;
    }
    const float scale = amax / 127.0F;
    const int64_t vector = head * sequences[s].length + token;
    keys_[s].scales[vector] = scale;
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      const double code = scale > 0.0F ? std::clamp(std::nearbyint(row[d] / scale), -127.0, 127.0) : 0.0;
      keys_[s].numbers[vector * shape.head_dim + d] = scale * static_cast<float>(code);
    }
    write_vector(k_pages, k_storage_, k_scales_, keys_[s], s, head, token);
  }
  const Elements& k_storage() const { return k_storage_; }
  // All scales of the pool, gaps and what lies in front of it included; empty unless the pages are int8.
  // The scales of all pages, gaps included; empty unless int8.
  std::vector<float> k_scales() const { return without_guard(k_scales_); }
  std::vector<float> v_scales() const { return without_guard(v_scales_); }

 private:
  static constexpr float kNanFloat = std::numeric_limits<float>::quiet_NaN();

  // Vectors [num_kv_heads, length, head_dim] of one sequence.
  struct Tokens {
    std::vector<float> numbers;
    std::vector<float> scales;  // of int8 pages, [num_kv_heads, length]
  };

  // Numbers that the element type holds exactly; drawing from a few makes large problems cheap.
  void fill_choices() {
    std::normal_distribution<double> normal;
    choices_.resize(1024);
    for (float& x : choices_) x = static_cast<float>(rounded_to(shape.query_type(), normal(random_)));
  }
  Tokens draw(int64_t num_vectors) {
    Tokens out{.numbers = std::vector<float>(static_cast<size_t>(num_vectors * shape.head_dim)),
               .scales = {}};
    if (shape.type != ElementType::kInt8) {
      for (float& x : out.numbers) x = choices_[random_() % choices_.size()];
      return out;
    }
    std::uniform_real_distribution<float> scale(0.001F, 0.03F);
    out.scales.resize(static_cast<size_t>(num_vectors));
    for (float& x : out.scales) x = random_() % 16 == 0 ? 0.0F : scale(random_);
    for (size_t i = 0; i < out.numbers.size(); ++i) {
      const auto code = static_cast<float>(static_cast<int>(random_() % 255) - 127);
      out.numbers[i] = out.scales[i / shape.head_dim] * code;
    }
    return out;
  }

  void lay_out_pools() {
    for (size_t s = 0; s < sequences.size(); ++s) num_pages += num_pages_of(s);
    num_pages += 2;
    page_ids_.resize(num_pages);
    std::iota(page_ids_.begin(), page_ids_.end(), 0);
    std::ranges::shuffle(page_ids_, random_);
    const int64_t head_stride = shape.page_size * shape.head_dim;
    const int64_t page_stride = shape.num_kv_heads * head_stride + 8;
    guard_ = page_stride;
    // The last page ends with the allocation: reading past a page is an error the sanitizer sees.
    const int64_t count = guard_ + num_pages * page_stride - 8;
    k_storage_ = Elements(shape.type, count);
    v_storage_ = Elements(shape.type, count);
    const int64_t guard_bytes = guard_ * core::element_size(shape.type);
    v_pages = {.data = v_storage_.data() + guard_bytes,
               .type = shape.type,
               .num_pages = num_pages,
               .page_stride = page_stride,
               .head_stride = head_stride,
               .token_stride = shape.head_dim,
               .channel_stride = 1};
    k_pages = v_pages;
    k_pages.data = k_storage_.data() + guard_bytes;
    if (shape.channel_major) {
      k_pages.token_stride = 1;
      k_pages.channel_stride = shape.page_size;
    }
    if (shape.type == ElementType::kInt8) {
      v_pages.scale_head_stride = shape.page_size;
      v_pages.scale_page_stride = shape.num_kv_heads * shape.page_size + 3;
      const auto num_scales = static_cast<size_t>((num_pages + 1) * v_pages.scale_page_stride);
      k_scales_.assign(num_scales, std::bit_cast<float>(0xffffffffU));
      v_scales_ = k_scales_;
      k_pages.scale_head_stride = v_pages.scale_head_stride;
      k_pages.scale_page_stride = v_pages.scale_page_stride;
      k_pages.scales = k_scales_.data() + k_pages.scale_page_stride;
      v_pages.scales = v_scales_.data() + v_pages.scale_page_stride;
      [[maybe_unused]] const auto guard_scale_bytes =
          sizeof(float) * static_cast<size_t>(k_pages.scale_page_stride);
      ASAN_POISON_MEMORY_REGION(k_scales_.data(), guard_scale_bytes);
      ASAN_POISON_MEMORY_REGION(v_scales_.data(), guard_scale_bytes);
    }
    ASAN_POISON_MEMORY_REGION(k_storage_.data(), guard_bytes);
    ASAN_POISON_MEMORY_REGION(v_storage_.data(), guard_bytes);
  }

  // The page before the first is there to catch reads and must not be touched.
  std::vector<float> without_guard(const std::vector<float>& scales) const {
    return {scales.begin() + (scales.empty() ? 0 : k_pages.scale_page_stride), scales.end()};
  }

  void write_pages(size_t s) {
    for (int64_t token = 0; token < sequences[s].length - sequences[s].num_new; ++token) {
      for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
        write_vector(k_pages, k_storage_, k_scales_, keys_[s], s, head, token);
        write_vector(v_pages, v_storage_, v_scales_, values_[s], s, head, token);
      }
    }
  }

  void write_vector(const core::PagePoolView& pool, Elements& storage, std::vector<float>& scales,
                    const Tokens& tokens, size_t s, int64_t head, int64_t token) {
    const int32_t page_id = page_tables[s][token / shape.page_size];
    const int64_t slot = token % shape.page_size;
    const int64_t vector = head * sequences[s].length + token;
    const bool is_int8 = shape.type == ElementType::kInt8;
    const float scale = is_int8 ? tokens.scales[vector] : 1.0F;
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      const float x = tokens.numbers[vector * shape.head_dim + d];
      const double element = !is_int8 ? x : (scale > 0.0F ? std::nearbyint(x / scale) : 0.0);
      storage.set(guard_ + offset(pool, page_id, head, slot, d), element);
    }
    if (is_int8) {
      scales[(page_id + 1) * pool.scale_page_stride + head * pool.scale_head_stride + slot] = scale;
    }
  }

  void hide_unseen_pages(size_t s) {
    int64_t first_seen = num_pages_of(s);
    for (const RowAt& row : row_places) {
      if (row.sequence != static_cast<int32_t>(s) || row.position < 0) continue;
      const int64_t first_token =
          shape.window > 0 ? std::max<int64_t>(0, row.position - shape.window + 1) : 0;
      first_seen = std::min(first_seen, first_token / shape.page_size);
    }
    std::fill_n(page_tables[s].begin(), first_seen, -1);
  }

  void make_queries() {
    // As a view of a fused projection: room for keys and values behind the query heads, NaN here.
    q = {.data = nullptr,
         .type = shape.query_type(),
         .token_stride = (shape.num_heads() + 2 * shape.num_kv_heads) * shape.head_dim,
         .head_stride = shape.head_dim};
    const int64_t num_places = static_cast<int64_t>(row_places.size());
    q_storage_ = Elements(shape.query_type(), num_places * q.token_stride);
    q.data = q_storage_.data();
    for (int64_t row = 0; row < num_places; ++row) {
      for (int64_t head = 0; head < shape.num_heads(); ++head) {
        for (int64_t d = 0; d < shape.head_dim; ++d) {
          set_query(row, head, d, choices_[random_() % choices_.size()]);
        }
      }
    }
  }

  std::mt19937 random_;
  std::vector<float> choices_;
  std::vector<Tokens> keys_;  // of each sequence
  std::vector<Tokens> values_;
  std::vector<int32_t> page_ids_;
  int64_t guard_ = 0;
  Elements k_storage_;
  Elements v_storage_;
  std::vector<float> k_scales_;  // [1 + num_pages, num_kv_heads, page_size] and gaps
  std::vector<float> v_scales_;
  Elements q_storage_;
};

// A long sequence with a partial last page and several chunks, a full last page, one token, none; rows at
// the ends, one in the middle of a page, one in a padding slot.
inline std::vector<Sequence> decode_batch(const Shape& shape) {
  return {{21 * shape.page_size + shape.page_size / 2 + 1}, {2 * shape.page_size}, {1}, {0}};
}
inline std::vector<RowAt> decode_rows(const Shape& shape) {
  const std::vector<Sequence> batch = decode_batch(shape);
  return {{0, batch[0].length - 1},
          {1, batch[1].length - 1},
          {2, 0},
          {3, -1},
          {0, 3 * shape.page_size + shape.page_size / 3},
          {1, -4}};
}

}  // namespace tinyserve::cpu::testing
