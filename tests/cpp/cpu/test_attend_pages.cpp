// attend_pages against attention's definition, and against each other where the result may
// not depend on the way it was come by.
#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <vector>

#include "attention_oracle.h"
#include "page_lists.h"

using namespace tinyserve::cpu;
using namespace tinyserve::cpu::testing;

TEST_CASE("Dense attention follows its definition for every type, layout and shape") {
  for (const Shape& shape : covering_shapes()) {
    CAPTURE(shape);
    const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 1);
    const int64_t width = max_visible_pages(problem);
    const ExpectedAttention expected = expected_attention(problem, nullptr, width);
    for (const KernelTable* kernels : targets()) {
      CAPTURE(kernels->target);
      const Attention actual = attend(*kernels, problem, nullptr, {}, /*with_page_lse=*/true);
      require_close_outputs(actual.out, expected.out, decode_rounding(expected, *kernels, problem));
      require_close(as_doubles(actual.lse), expected.lse, 3e-5 + expected.lse_rounding);
      require_close(as_doubles(actual.page_lse), expected.page_lse, 3e-5 + expected.lse_rounding);
    }
  }
}

TEST_CASE("Any number of query heads and kv heads follows the definition") {
  // More than are worked on at once: many kv heads, many query heads of each, and both.
  struct Heads {
    int64_t num_kv_heads;
    int64_t group_size;
  };
  for (const auto& [num_kv_heads, group_size] : {Heads{19, 1}, Heads{1, 70}, Heads{7, 9}}) {
    for (const ElementType type : {ElementType::kFloat32, ElementType::kBFloat16}) {
      const Shape shape{.type = type,
                        .page_size = 7,
                        .head_dim = 40,
                        .group_size = group_size,
                        .channel_major = true,
                        .num_kv_heads = num_kv_heads};
      const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 11);
      const ExpectedAttention expected = expected_attention(problem);
      for (const KernelTable* kernels : targets()) {
        CAPTURE(shape, num_kv_heads, kernels->target);
        const Attention actual = attend(*kernels, problem);
        require_close_outputs(actual.out, expected.out, decode_rounding(expected, *kernels, problem));
        require_close(as_doubles(actual.lse), expected.lse, 3e-5);
      }
    }
  }
}

TEST_CASE("Where all values are equal, so is the output") {
  for (const ElementType type : kElementTypes) {
    for (const bool channel_major : {false, true}) {
      const Shape shape{.type = type, .head_dim = 40, .group_size = 5, .channel_major = channel_major};
      PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 12);
      for (size_t s = 0; s < problem.sequences.size(); ++s) {
        for (int64_t i = 0; i < shape.num_kv_heads * problem.sequences[s].length; ++i) {
          for (int64_t d = 0; d < shape.head_dim; ++d) {
            problem.set_value(static_cast<int64_t>(s), i % shape.num_kv_heads, i / shape.num_kv_heads, d,
                              1.0 + static_cast<double>(d) / 64.0);
          }
        }
      }
      for (const KernelTable* kernels : targets()) {
        CAPTURE(kernels->target, shape);
        const Attention actual = attend(*kernels, problem);
        for (int64_t i = 0; i < actual.out.size(); ++i) {
          const int64_t row = i / (shape.num_heads() * shape.head_dim);
          if (problem.rows[row].num_tokens == 0) continue;
          const double value = 1.0 + static_cast<double>(i % shape.head_dim) / 64.0;
          if (std::fabs(actual.out.get(i) - value) > 2e-6) FAIL("got " << actual.out.get(i) << " at " << i);
        }
      }
    }
  }
}

TEST_CASE("A NaN in a token that a window hides reaches no row") {
  for (const ElementType type : kElementTypes) {
    for (const int64_t window : {3, 4, 5, 16}) {
      const Shape shape{
          .type = type, .head_dim = 40, .group_size = 4, .channel_major = true, .window = window};
      PagedProblem problem(shape, {{50}}, {{0, 49}}, 13);
      for (const KernelTable* kernels : targets()) {
        CAPTURE(kernels->target, shape);
        const int64_t hidden = 49 - window;
        const double key = problem.key(0, 1, hidden)[7], value = problem.value(0, 1, hidden)[7];
        const Attention clean = attend(*kernels, problem);
        problem.set_key(0, 1, hidden, 7, kNan);
        problem.set_value(0, 1, hidden, 7, kNan);
        require_same_attention(attend(*kernels, problem), clean);
        problem.set_key(0, 1, hidden, 7, key);
        problem.set_value(0, 1, hidden, 7, value);
        // The first token that the window shows, which may share a pair with the hidden one.
        const double shown = problem.value(0, 1, hidden + 1)[7];
        problem.set_value(0, 1, hidden + 1, 7, kInfinity);
        const Attention infinite = attend(*kernels, problem);
        problem.set_value(0, 1, hidden + 1, 7, shown);
        for (int64_t i = 0; i < infinite.out.size(); ++i) {
          const bool touched = i / shape.head_dim >= shape.group_size && i % shape.head_dim == 7;
          if (std::isfinite(infinite.out.get(i)) == touched) FAIL("out at " << i);
        }
      }
    }
  }
}

TEST_CASE("Attention over page lists sees the listed pages only") {
  for (const Shape& shape : covering_shapes(32)) {
    CAPTURE(shape);
    const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 2);
    const PageLists lists = draw_lists(problem, 18, 3);
    const ExpectedAttention expected = expected_attention(problem, &lists, lists.width);
    for (const KernelTable* kernels : targets()) {
      CAPTURE(kernels->target);
      const Attention actual = attend(*kernels, problem, &lists, {}, /*with_page_lse=*/true);
      require_close_outputs(actual.out, expected.out, decode_rounding(expected, *kernels, problem));
      require_close(as_doubles(actual.lse), expected.lse, 3e-5 + expected.lse_rounding);
      require_close(as_doubles(actual.page_lse), expected.page_lse, 3e-5 + expected.lse_rounding);
    }
  }
}

TEST_CASE("A list of all visible pages gives the bits of dense attention") {
  for (const Shape& shape : covering_shapes()) {
    CAPTURE(shape);
    const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 4);
    const PageLists lists = full_lists(problem, max_visible_pages(problem) + 20);
    for (const KernelTable* kernels : targets()) {
      CAPTURE(kernels->target);
      const Attention dense = attend(*kernels, problem);
      require_same_attention(attend(*kernels, problem, &lists), dense);
      require_same_attention(attend(*kernels, problem, nullptr, {}, /*with_page_lse=*/true), dense);
      require_same_attention(attend(*kernels, problem, nullptr, {}, false, /*spare_chunks=*/2), dense);
    }
  }
}

TEST_CASE("Threads and the order of work items do not change a bit of attention") {
  for (const Shape& shape : covering_shapes(16)) {
    CAPTURE(shape);
    const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 5);
    for (const KernelTable* kernels : targets()) {
      const Attention serial = attend(*kernels, problem, nullptr, {}, /*with_page_lse=*/true);
      for (const Schedule& schedule : kOtherSchedules) {
        CAPTURE(kernels->target, schedule);
        const Attention other = attend(*kernels, problem, nullptr, schedule, /*with_page_lse=*/true);
        require_same_attention(other, serial);
        require_same_bits(other.page_lse, serial.page_lse);
      }
    }
  }
}

TEST_CASE("A row of a batch gives the bits it gives alone") {
  for (const Shape& shape : covering_shapes(16)) {
    CAPTURE(shape);
    PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 6);
    for (const KernelTable* kernels : targets()) {
      CAPTURE(kernels->target);
      const Attention batched = attend(*kernels, problem);
      const std::vector<tinyserve::core::Row> rows = problem.rows;
      const tinyserve::core::PackedView q = problem.q;
      const int64_t out_bytes =
          shape.num_heads() * shape.head_dim * tinyserve::core::element_size(shape.query_type());
      for (size_t r = 0; r < rows.size(); ++r) {
        problem.rows = {rows[r]};
        problem.q.data = static_cast<const uint8_t*>(q.data) +
                         static_cast<int64_t>(r) * q.token_stride * tinyserve::core::element_size(q.type);
        const Attention solo = attend(*kernels, problem);
        const auto begin = batched.out.bytes().begin() + static_cast<int64_t>(r) * out_bytes;
        require_same_bits(solo.out.bytes(), std::vector<uint8_t>(begin, begin + out_bytes));
        const auto lse = batched.lse.begin() + static_cast<int64_t>(r) * shape.num_heads();
        require_same_bits(solo.lse, std::vector<float>(lse, lse + shape.num_heads()));
      }
      problem.rows = rows;
      problem.q = q;
    }
  }
}

TEST_CASE("CPU targets agree within fp32 rounding") {
  const Shape shape{.page_size = 7, .head_dim = 128, .group_size = 5, .channel_major = true};
  const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 7);
  const Attention scalar = attend(*targets().front(), problem);
  for (const KernelTable* kernels : targets()) {
    CAPTURE(kernels->target);
    const Attention other = attend(*kernels, problem);
    require_close(other.out.values(), scalar.out.values(), 1e-5);
    require_close(as_doubles(other.lse), as_doubles(scalar.lse), 1e-5);
  }
}

TEST_CASE("Queries and pages may have different element types") {
  const Shape shape{.type = ElementType::kBFloat16, .page_size = 16, .head_dim = 64, .group_size = 4};
  PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 8);
  for (const KernelTable* kernels : targets()) {
    CAPTURE(kernels->target);
    const Attention narrow = attend(*kernels, problem);
    const bool same_products = !rounds_probabilities(*kernels, problem);
    Elements wide_q(ElementType::kFloat32, problem.num_rows() * problem.q.token_stride);
    for (int64_t row = 0; row < problem.num_rows(); ++row) {
      for (int64_t head = 0; head < shape.num_heads(); ++head) {
        const std::vector<double> q = problem.query(row, head);
        for (int64_t d = 0; d < shape.head_dim; ++d) {
          wide_q.set(row * problem.q.token_stride + head * problem.q.head_stride + d, q[d]);
        }
      }
    }
    const tinyserve::core::PackedView q = problem.q;
    problem.q.data = wide_q.data();
    problem.q.type = ElementType::kFloat32;
    problem.shape.type = ElementType::kFloat32;  // of the output
    const Attention wide = attend(*kernels, problem);
    problem.q = q;
    problem.shape.type = shape.type;
    if (!same_products) {  // queries of another type than the pages are multiplied in fp32
      const ExpectedAttention expected = expected_attention(problem);
      require_close(as_doubles(wide.lse), expected.lse, 3e-5);
      require_close_outputs(wide.out, expected.out);
      require_close(as_doubles(narrow.lse), expected.lse, 3e-5);
      continue;
    }
    require_same_bits(wide.lse, narrow.lse);
    for (int64_t i = 0; i < wide.out.size(); ++i) {
      if (rounded_to(shape.type, wide.out.get(i)) != narrow.out.get(i))
        FAIL("rounded output differs at " << i);
    }
  }
}

TEST_CASE("Large logits neither overflow nor lose the small ones of their chunk") {
  const Shape shape{.page_size = 1, .head_dim = 8, .group_size = 1, .num_kv_heads = 1};
  for (const KernelTable* kernels : targets()) {
    CAPTURE(kernels->target);
    PagedProblem problem(shape, {{40}}, {{0, 39}}, 9);
    for (int64_t d = 0; d < shape.head_dim; ++d) problem.set_query(0, 0, d, d == 0 ? 1.0 : 0.0);
    // Chunks 0 and 1 are far below the third; within a chunk the logits differ by one.
    for (int64_t token = 0; token < 40; ++token) {
      const double logit = (token < 32 ? -1000.0 : 1000.0) + static_cast<double>(token % 2);
      problem.set_key(0, 0, token, 0, logit * std::sqrt(8.0));
    }
    const Attention actual = attend(*kernels, problem, nullptr, {}, /*with_page_lse=*/true);
    const double expected_lse = 1000.0 + std::log(4.0 * (1.0 + std::exp(1.0)));
    require_close(as_doubles(actual.lse), std::vector{expected_lse}, 1e-3);
    double weighted = 0.0;
    for (int64_t token = 32; token < 40; ++token) {
      weighted +=
          problem.value(0, 0, token)[0] * std::exp(1000.0 + static_cast<double>(token % 2) - expected_lse);
    }
    REQUIRE(std::fabs(actual.out.get(0) - weighted) < 1e-3);
    REQUIRE(std::fabs(actual.page_lse[0] - -1000.0) < 1e-3);
  }
}

TEST_CASE("A NaN key makes its own rows NaN and no others") {
  const Shape shape{.type = ElementType::kFloat16, .page_size = 7, .head_dim = 40, .group_size = 3};
  for (const bool channel_major : {false, true}) {
    Shape layout = shape;
    layout.channel_major = channel_major;
    PagedProblem problem(layout, decode_batch(layout), decode_rows(layout), 10);
    for (const KernelTable* kernels : targets()) {
      CAPTURE(kernels->target, channel_major);
      const Attention clean = attend(*kernels, problem);
      const double original = problem.key(1, 0, 9)[3];
      problem.set_key(1, 0, 9, 3, kNan);
      const Attention actual = attend(*kernels, problem);
      problem.set_key(1, 0, 9, 3, original);
      for (int64_t i = 0; i < problem.num_rows() * layout.num_heads(); ++i) {
        const bool touched = i / layout.num_heads() == 1 && i % layout.num_heads() < layout.group_size;
        const bool same = actual.lse[i] == clean.lse[i];
        if (touched ? !std::isnan(actual.lse[i]) : !same) FAIL("lse " << actual.lse[i] << " at " << i);
        if (touched != std::isnan(actual.out.get(i * layout.head_dim))) FAIL("out at head " << i);
      }
    }
  }
}

TEST_CASE("A row of int8 pages whose scale is NaN makes the rows that see it NaN and no others") {
  for (const bool channel_major : {false, true}) {
    const Shape shape{.type = ElementType::kInt8,
                      .page_size = 7,
                      .head_dim = 40,
                      .group_size = 3,
                      .channel_major = channel_major};
    for (const KernelTable* kernels : targets()) {
      CAPTURE(kernels->target, channel_major);
      PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 10);
      const Attention clean = attend(*kernels, problem);
      std::vector<double> row(40, 1.0);
      row[3] = kInfinity;
      problem.set_key_row(1, 0, 9, row);
      const Attention actual = attend(*kernels, problem);
      for (int64_t i = 0; i < problem.num_rows() * shape.num_heads(); ++i) {
        const bool touched = i / shape.num_heads() == 1 && i % shape.num_heads() < shape.group_size;
        const bool same = actual.lse[i] == clean.lse[i];
        if (touched ? !std::isnan(actual.lse[i]) : !same) FAIL("lse " << actual.lse[i] << " at " << i);
        if (touched != std::isnan(actual.out.get(i * shape.head_dim))) FAIL("out at head " << i);
      }
    }
  }
}
