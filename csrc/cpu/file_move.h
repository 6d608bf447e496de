// A move of elements whose source lies in a file, which is read in pieces that stay in the cache.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels.h"
#include "plan.h"

namespace qload::cpu {

struct FileBytes {  // of a file that is open
  int descriptor;
  int64_t begin, count;
};

/// What `move` does, of elements of a file, piece by piece, in any order and by any thread.
class FilePieces {
 public:
  /// Nothing where the move cannot be made in pieces of `piece` bytes at most: in equal steps, or as a whole. Without
  /// digits bytes stay in order.
  static std::optional<FilePieces> of(const Kernels& kernels, int bits, const std::vector<Digit>& digits,
                                      const FileBytes& from, uint8_t* to, int64_t piece);

  int64_t count() const { return (steps_.count + together_ - 1) / together_; }

  /// Reads a piece to `scratch`, so many bytes from a multiple of 64 on, and moves it from there. False where it could
  /// not be read whole: what `to` holds then is nothing.
  bool move(int64_t piece, uint8_t* scratch) const;

 private:
  struct Steps {  // of the plan's outermost loop, which lie in the source one behind another
    int64_t count, tiles, bytes;  // of a step
    int64_t to;                   // between steps
  };
  static bool in_steps(const Plan& plan, Steps& steps);

  FilePieces(const Kernels* kernels, std::vector<Plan> plans, const Steps& steps, const FileBytes& from, uint8_t* to,
             int64_t together);

  const Kernels* kernels_;  // null: bytes are read to where they belong
  std::vector<Plan> plans_;  // of one piece all that it takes, else the one of steps
  Steps steps_;
  FileBytes from_;
  uint8_t* to_;
  int64_t together_;  // steps of a piece
};

/// All pieces of a move, by some threads, of which each has `piece` bytes of `scratch`. False as above.
bool move_from_file(const Kernels& kernels, int bits, const std::vector<Digit>& digits, const FileBytes& from,
                    uint8_t* to, uint8_t* scratch, int64_t piece, int threads);

}  // namespace qload::cpu
