// Inputs in the order of a weight's rows, and panels divided among threads.
#include "product.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

#include "parallel.h"

namespace qload::cpu {
namespace {

constexpr int64_t kTokens = 256;        // whose inputs lie ready at once
constexpr int64_t kWork = 1 << 18;      // codes times tokens that are worth a thread

/// Where the weight's rows get their inputs: place[row], -1 for padding.
std::vector<int32_t> places(const Panels& weight, const Inputs& in) {
  std::vector<int32_t> place(static_cast<size_t>(weight.rows), -1);
  int64_t i = 0;
  for (int64_t start = 0; start < weight.rows && i < in.K; start += weight.run)
    for (int64_t row = start; row < start + in.group && i < in.K; ++row, ++i) {
      const int32_t from = in.perm ? in.perm[i] : static_cast<int32_t>(i);
      if (from < 0 || from >= in.K) throw std::invalid_argument("a permutation leaves the inputs");
      place[static_cast<size_t>(row)] = from;
    }
  if (i < in.K) throw std::invalid_argument("the weight has fewer rows than there are inputs");
  return place;
}

class Gathered {
 public:
  Gathered(const Kernels& kernels, const Panels& weight, const Inputs& in) : kernels_(kernels), in_(in) {
    if (in.perm || weight.run != in.group) place_ = places(weight, in);
    if (in.perm || weight.run != in.group) row_.resize(static_cast<size_t>(in.K));
  }

  /// Tokens [first, first + count), block after block, into count * rows floats.
  void fill(int64_t first, int64_t count, int64_t rows, float* to) {
    for (int64_t m = 0; m < count; ++m) {
      const int64_t block = m / kBlock * kBlock, size = std::min<int64_t>(kBlock, count - block);
      one(first + m, rows, to + block * rows + (m - block), size);
    }
  }

 private:
  void one(int64_t token, int64_t rows, float* to, int64_t step) {
    const int64_t size = in_.type == Float::kFloat32 ? 4 : 2;
    const void* const x = static_cast<const uint8_t*>(in_.x) + token * in_.pitch * size;
    if (place_.empty()) {
      kernels_.products->widen(x, in_.type, in_.K, to, step);
      for (int64_t row = in_.K; row < rows; ++row) to[row * step] = 0;
      return;
    }
    kernels_.products->widen(x, in_.type, in_.K, row_.data(), 1);
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t from = place_[static_cast<size_t>(row)];
      to[row * step] = from < 0 ? 0 : row_[static_cast<size_t>(from)];
    }
  }

  const Kernels& kernels_;
  const Inputs& in_;
  std::vector<int32_t> place_;
  std::vector<float> row_;
};

}  // namespace

void multiply(const Kernels& kernels, const Panels& weight, const Inputs& inputs, const Outputs& outputs, int few,
              int threads) {
  const int64_t panels = (outputs.N + kPanel - 1) / kPanel, most = std::min(kTokens, inputs.M);
  if (!inputs.M || !panels) return;
  Gathered gathered(kernels, weight, inputs);
  const std::unique_ptr<float[]> x(new float[static_cast<size_t>(std::max<int64_t>(1, most * weight.rows))]);
  for (int64_t first = 0; first < inputs.M; first += kTokens) {
    const Tokens tokens{x.get(), std::min(kTokens, inputs.M - first), first};
    gathered.fill(first, tokens.count, weight.rows, x.get());
    const int64_t least = kWork / std::max<int64_t>(1, weight.rows * kPanel * tokens.count) + 1;
    parallel_for(panels, least, threads, [&](int64_t begin, int64_t end) {
      const auto floats = static_cast<size_t>(kernels.products->scratch_of(tokens.count));
      const std::unique_ptr<float[]> scratch(new float[floats]);
      kernels.products->multiply(weight, tokens, outputs, begin, end, few, scratch.get());
    });
  }
}

}  // namespace qload::cpu
