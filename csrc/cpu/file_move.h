// A move of elements from a file, read in pieces that stay in the cache.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels.h"
#include "plan.h"

namespace qload::cpu {

struct FileBytes {  // a range of an open file
  int descriptor;
  int64_t begin, count;
};

/// The work of `move` with elements of a file as a list of pieces, for any order and any thread.
class FilePieces {
 public:
  /// None if the move has no division into pieces of at most `piece` bytes, by equal steps or as a whole. Without
  /// digits the order of bytes does not change.
  static std::optional<FilePieces> of(const Kernels& kernels, int bits, const std::vector<Digit>& digits,
                                      const FileBytes& from, uint8_t* to, int64_t piece);

  int64_t count() const { return (steps_.count + together_ - 1) / together_; }

  /// Reads a piece to `scratch`, aligned to 64 bytes and as large as a piece, and moves it from there. False if the
  /// read was incomplete; then the content of `to` is undefined.
  bool move(int64_t piece, uint8_t* scratch) const;

 private:
  struct Steps {  // of the plan's outermost loop, contiguous in the source
    int64_t count, tiles, bytes;  // of one step
    int64_t to;                   // between steps
  };
  static bool in_steps(const Plan& plan, Steps& steps);

  FilePieces(const Kernels* kernels, std::vector<Plan> plans, const Steps& steps, const FileBytes& from, uint8_t* to,
             int64_t together);

  const Kernels* kernels_;  // null: bytes are read directly into `to`
  std::vector<Plan> plans_;  // all plans of a single piece, or the one plan of equal steps
  Steps steps_;
  FileBytes from_;
  uint8_t* to_;
  int64_t together_;  // steps of a piece
};

/// Moves all pieces on several threads, each with `piece` bytes of `scratch`. False if a read was incomplete.
bool move_from_file(const Kernels& kernels, int bits, const std::vector<Digit>& digits, const FileBytes& from,
                    uint8_t* to, uint8_t* scratch, int64_t piece, int threads);

}  // namespace qload::cpu
