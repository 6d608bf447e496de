// Packed words on one side, plain rows on the other, in boxes of rows and columns.
//
//   pack        codes[r, c] -> words
//   unpack      words -> codes[r, c]
//   dequantize  words -> (value(code[r, c]) - zero) * scale
//
// A box is a few whole granules of both axes; its codes, packed in plain order, fit kScratch bytes. One side
// of it is a move between two packed orders (move.h), the other runs along rows (narrow.h, expand.h). The only
// transient memory is kScratch bytes a thread, on its stack. Boxes of 2048 columns write a page of bfloat16 to each
// row: shorter pieces of more rows cost more in writes than larger boxes cost in the L2.
//
// Equal Packing.pack, Packing.unpack (qload/layouts/packing.py) and Codes.dequantize (qload/spec/weight.py).
#include "boxes.h"

#include <algorithm>
#include <atomic>

#include "move.h"
#include "parallel.h"

namespace qload::cpu {
namespace {

constexpr int64_t kBox = kScratch / 2;  // bytes of a box, if granules leave a choice
constexpr int64_t kColumns = 2048;  // of a box, if the axis has as many and a granule of rows leaves room
constexpr int64_t kGathered = 512;  // columns of a box of gathered rows: all words of a strip stay in the L2

int64_t product(const std::vector<Place>& axis, size_t count) {
  int64_t size = 1;
  for (size_t i = 0; i < count; ++i) size *= axis[i].size;
  return size;
}

struct Cut {  // an axis as runs of granules
  const std::vector<Place>& axis;
  int64_t granule, count, run;

  explicit Cut(const std::vector<Place>& of)
      : axis(of), granule(product(of, of.size() - 1)), count(of.back().size), run(1) {}

  void reach(int64_t size) { run = std::min(count, std::max<int64_t>(1, size / granule)); }
  int64_t boxes() const { return (count + run - 1) / run; }
  int64_t granules(int64_t box) const { return std::min(run, count - box * run); }
  int64_t start(int64_t box) const { return box * run * granule; }       // rows or columns
  int64_t offset(int64_t box) const { return box * run * axis.back().stride; }  // in codes
};

// Rows of the scratch space start at whole registers: their pitch is a multiple of this number of columns.
int64_t unit_of(int bits) { return 512 / bits; }

int64_t pitch_of(int64_t columns, int bits) { return (columns + unit_of(bits) - 1) / unit_of(bits) * unit_of(bits); }

int64_t most_columns(const Cut& rows, int bits) {
  const int64_t room = kBox * 8 / bits / std::max<int64_t>(rows.granule, 1);
  return std::min(kColumns, room / unit_of(bits) * unit_of(bits));
}

struct Box {
  int64_t row, rows, column, columns, offset;  // offset: of its first code in the packed order
  const std::vector<Plan>& plans;
};

class Boxes {
 public:
  Boxes(const Kernels& kernels, const Packed& packed, bool pack, int64_t most = kColumns)
      : kernels_(kernels), bits_(packed.bits), rows_(packed.rows), columns_(packed.columns) {
    columns_.reach(std::min(most, most_columns(rows_, bits_)));
    pitch_ = pitch_of(columns_.run * columns_.granule, bits_);
    rows_.reach(kBox * 8 / bits_ / pitch_);
    for (int kind = 0; kind < 4; ++kind) {
      const int64_t row_box = kind & 1 ? rows_.boxes() - 1 : 0, column_box = kind & 2 ? columns_.boxes() - 1 : 0;
      plans_[kind] = plans(rows_.granules(row_box), columns_.granules(column_box), pack);
    }
  }

  int64_t pitch() const { return pitch_; }
  int64_t row_bytes() const { return pitch_ * bits_ / 8; }

  /// Calls `work(box)` for every box; either columns or rows are the inner loop.
  template <class Work>
  void each(int threads, bool rows_inside, const Work& work) const {
    const int64_t across = columns_.boxes(), down = rows_.boxes();
    const int64_t bytes = rows_.run * rows_.granule * columns_.run * columns_.granule;
    parallel_for(across * down, std::max<int64_t>(1, kLeastBytes / bytes), threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = rows_inside ? i % down : i / across, column = rows_inside ? i / down : i % across;
        const int kind = (row == down - 1 ? 1 : 0) | (column == across - 1 ? 2 : 0);
        work(Box{rows_.start(row), rows_.granules(row) * rows_.granule, columns_.start(column),
                 columns_.granules(column) * columns_.granule, rows_.offset(row) + columns_.offset(column),
                 plans_[kind]});
      }
      kernels_.fence();
    });
  }

  void run(const Box& box, const uint8_t* from, uint8_t* to, bool stream) const {
    for (const Plan& plan : box.plans) run_plan(kernels_, plan, from, to, 0, plan.tiles, stream);
  }

 private:
  std::vector<Plan> plans(int64_t rows, int64_t columns, bool pack) const {
    std::vector<Digit> digits;
    const auto add = [&](const std::vector<Place>& axis, int64_t outermost, int64_t plain) {
      for (size_t d = 0; d < axis.size(); ++d) {
        const int64_t size = d + 1 < axis.size() ? axis[d].size : outermost;
        digits.push_back(pack ? Digit{size, plain, axis[d].stride} : Digit{size, axis[d].stride, plain});
        plain *= size;
      }
    };
    add(columns_.axis, columns, 1);
    add(rows_.axis, rows, pitch_);
    return make_plans(bits_, digits, kernels_.widest, pack ? Pace::kTarget : Pace::kSource);
  }

  const Kernels& kernels_;
  int bits_;
  Cut rows_, columns_;
  int64_t pitch_;
  std::vector<Plan> plans_[4];
};

bool empty(const Packed& packed) {
  return product(packed.rows, packed.rows.size()) * product(packed.columns, packed.columns.size()) == 0;
}

int64_t all_bytes(const Packed& packed) {
  return product(packed.rows, packed.rows.size()) * product(packed.columns, packed.columns.size()) * packed.bits / 8;
}

int64_t size_of(Float type) { return type == Float::kFloat32 ? 4 : 2; }

}  // namespace

int64_t table_of(const Values& values, int64_t row) {
  return values.row_group ? values.row_group[row] : row / values.row_run;
}

Meaning of_row(const Values& values, int64_t row) {
  Meaning here = values.meaning;
  const int64_t table = table_of(values, row) * values.groups;
  here.scale += table;
  if (here.zero) here.zero += table;
  return here;
}

bool fits(const Packed& packed) {
  if (empty(packed)) return true;
  const Cut rows(packed.rows), columns(packed.columns);
  const bool bytes = rows.axis.back().stride * packed.bits % 8 == 0 && columns.axis.back().stride * packed.bits % 8 == 0;
  return bytes && rows.granule * pitch_of(columns.granule, packed.bits) * packed.bits / 8 <= kScratch;
}

uint32_t pack(const Kernels& kernels, const Packed& packed, const int32_t* codes, int64_t pitch,
              const int64_t* source, const int32_t* shift, uint8_t* words, int threads) {
  if (empty(packed)) return 0;
  const Boxes boxes(kernels, packed, true, source ? kGathered : kColumns);
  const bool stream = all_bytes(packed) >= kStreamBytes;
  std::atomic<uint32_t> seen{0};
  boxes.each(threads, source != nullptr, [&](const Box& box) {
    alignas(64) uint8_t plain[kScratch];
    uint32_t here = 0;
    for (int64_t r = 0; r < box.rows; ++r) {
      const int64_t row = box.row + r;
      here |= kernels.narrow(packed.bits, codes + (source ? source[row] : row * pitch) + box.column, box.columns,
                             shift ? shift[row] : 0, plain + r * boxes.row_bytes());
    }
    boxes.run(box, plain, words + box.offset * packed.bits / 8, stream);
    seen.fetch_or(here, std::memory_order_relaxed);
  });
  return seen;
}

void unpack(const Kernels& kernels, const Packed& packed, const uint8_t* words, int32_t* codes, int64_t pitch,
            int threads) {
  if (empty(packed)) return;
  const Boxes boxes(kernels, packed, false);
  boxes.each(threads, false, [&](const Box& box) {
    alignas(64) uint8_t plain[kScratch];
    boxes.run(box, words + box.offset * packed.bits / 8, plain, false);
    for (int64_t r = 0; r < box.rows; ++r)
      kernels.widen(packed.bits, plain + r * boxes.row_bytes(), box.columns,
                    codes + (box.row + r) * pitch + box.column);
  });
}

void dequantize(const Kernels& kernels, const Packed& packed, const Values& values, const uint8_t* words,
                int64_t height, int64_t width, uint8_t* out, int64_t pitch, int threads) {
  if (empty(packed)) return;
  const Boxes boxes(kernels, packed, false);
  const int64_t size = size_of(values.meaning.out);
  const bool stream = all_bytes(packed) >= kStreamBytes;
  boxes.each(threads, false, [&](const Box& box) {
    alignas(64) uint8_t plain[kScratch];
    const int64_t rows = std::min(box.rows, height - box.row), end = std::min(box.column + box.columns, width);
    if (rows <= 0 || end <= box.column) return;
    boxes.run(box, words + box.offset * packed.bits / 8, plain, false);
    for (int64_t r = 0; r < rows; ++r)
      kernels.expand(of_row(values, box.row + r), plain + r * boxes.row_bytes(), box.column, end,
                     out + (box.row + r) * pitch * size, stream);
  });
}

void dequantize_rows(const Kernels& kernels, const Values& values, const uint8_t* codes, int64_t row_bytes,
                     int64_t rows, int64_t columns, uint8_t* out, int64_t pitch, int threads) {
  if (rows * columns == 0) return;
  const Meaning& meaning = values.meaning;
  const int64_t size = size_of(meaning.out), unit = kColumns * 4;
  const int64_t parts = (columns + unit - 1) / unit;
  const bool stream = rows * columns * size >= kStreamBytes;
  parallel_for(rows * parts, std::max<int64_t>(1, kLeastBytes / std::min(unit, columns)), threads,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t row = i / parts, first = i % parts * unit, last = std::min(first + unit, columns);
                   kernels.expand(of_row(values, row), codes + row * row_bytes + first * meaning.bits / 8, first,
                                  last, out + row * pitch * size, stream);
                 }
                 kernels.fence();
               });
}

}  // namespace qload::cpu
