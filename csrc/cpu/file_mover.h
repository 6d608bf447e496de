// Moves of elements that lie in files, by threads that know nothing of Python and of its lock.
//
// A ticket has some moves. Threads take pieces (file_move.h) of the ticket that was begun first, all of them of the same
// one, until none is left; so tickets are done one after another, as they are asked for.
//
// Equals `move` (move.cpp) of the same bytes, bit for bit. Of a move that could not be made nothing is said but that.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "file_move.h"

namespace qload::cpu {

struct FileMove {
  int bits;
  std::vector<Digit> digits;
  FileBytes from;
  uint8_t* to;
};

class FileMover {
 public:
  /// `scratch`: for each thread `piece` bytes, from a multiple of 64 on.
  FileMover(const Kernels& kernels, uint8_t* scratch, int64_t piece, int threads);
  FileMover(const FileMover&) = delete;
  FileMover& operator=(const FileMover&) = delete;
  ~FileMover() { close(); }

  /// Whether this process made the threads: a copy of it, by fork, has none, and locks that they may have held.
  bool is_here() const;

  /// Begins to move: descriptors stay open, and memory stays, until the ticket was waited for or all is closed.
  uint64_t begin(const std::vector<FileMove>& moves);

  /// Whether `wait` would return at once, now or within so long.
  bool is_done(uint64_t ticket, std::chrono::milliseconds patience);

  /// Waits, each ticket once: of each of its moves whether it was made.
  std::vector<bool> wait(uint64_t ticket);

  /// Begins no piece any more, and waits for the threads.
  void close();

 private:
  struct Move {
    std::optional<FilePieces> pieces;
    int64_t next = 0;  // piece that no thread has taken
    bool failed = false;
  };
  struct Ticket {
    std::vector<Move> moves;
    size_t at = 0;         // the move whose pieces are taken
    int64_t pending = 0;   // pieces that were taken, or will be
  };

  void work(uint8_t* scratch);
  Move* next(Ticket& ticket);
  const std::shared_ptr<Ticket>& find(uint64_t number);

  const Kernels& kernels_;
  const int64_t piece_, process_;

  std::mutex lock_;  // of all below
  std::condition_variable more_, done_;
  std::deque<std::shared_ptr<Ticket>> begun_;  // that have pieces which no thread has taken
  std::map<uint64_t, std::shared_ptr<Ticket>> tickets_;
  uint64_t last_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

/// For who holds one: in a copy of the process nothing of it can be ended, and it is left as it is.
struct LeftInCopies {
  void operator()(FileMover* mover) const {
    if (mover->is_here()) delete mover;
  }
};

}  // namespace qload::cpu
