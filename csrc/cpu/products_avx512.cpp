// Products for AVX-512, with VNNI if the machine has it.
#include "dots_avx512.h"
#include "lanes_avx512.h"
#include "panels.h"
#include "rows_avx512.h"
#include "rows_spelled.h"
#include "scales_avx512.h"
#include "widen.h"

namespace qload::cpu {
namespace {

constexpr int64_t kMostFewOfRows = 8;  // tokens: for four more, rows decoded to memory are faster

constexpr Products products(decltype(Products::multiply_fixed) fixed) {
  return {widen<LanesAvx512>, multiply<LanesAvx512>, scratch_of,   dots_avx512<FloatDots>, nullptr, finish<LanesAvx512>,
          nullptr,            fixed,                 scales_avx512, spell_floats,           few_floats, kMostFewOfRows};
}

}  // namespace

extern const Products kAvx512Products, kVnniProducts;
const Products kAvx512Products = products(nullptr), kVnniProducts = products(multiply_fixed_vnni);

}  // namespace qload::cpu
