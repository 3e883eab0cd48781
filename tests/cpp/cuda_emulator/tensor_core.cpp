#include "cuda_emulator/tensor_core.h"

#include <string>

namespace tinyserve::cuda::emulator {

void ldmatrix(const Site& site, uint32_t* fragment, int count, bool transposed, const void* row) {
  const SharedMemory shared = shared_memory();
  const std::shared_ptr<const LaneValues> lanes = exchange(site, 0xffffffffU, &row, sizeof(row));
  for (int matrix = 0; matrix < count; ++matrix) {
    const auto element = [&](int r, int column) {
      const auto* begin = lanes->of<const std::byte*>(8 * matrix + r);
      const auto offset = begin - shared.begin;
      if (offset < 0 || static_cast<size_t>(offset) + 16 > shared.bytes || offset % 16 != 0) {
        fail(site, "expected rows of 16 bytes within the " + std::to_string(shared.bytes) +
                       " bytes of shared memory, aligned to 16; got offset " + std::to_string(offset) +
                       " from lane " + std::to_string(8 * matrix + r));
      }
      uint16_t bits;
      std::memcpy(&bits, begin + 2 * column, 2);
      return bits;
    };
    const int line = lane_id() / 4;
    const int pair = lane_id() % 4 * 2;
    const uint32_t low = transposed ? element(pair, line) : element(line, pair);
    const uint32_t high = transposed ? element(pair + 1, line) : element(line, pair + 1);
    fragment[matrix] = low | high << 16;
  }
}

}  // namespace tinyserve::cuda::emulator
