// Where the tensors of the CPU's library file lie.

#include "torch/checks.h"

namespace tinyserve {

void check_device(const Tensor& tensor, const char* name) {
  TINYSERVE_CHECK(tensor.is_cpu(), name,
                  ": expected a tensor on the CPU like the others, got one on another device");
}

}  // namespace tinyserve
