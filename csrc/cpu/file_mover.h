// Moves of elements from files, on threads without any use of Python or its lock.
//
// A ticket has some moves. All threads take pieces (file_move.h) of the oldest ticket until none is left; so tickets
// complete in the order of their submission.
//
// Equals `move` (move.cpp) of the same bytes, bit for bit. A failed move is reported without a reason.
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
  /// `scratch`: `piece` bytes for each thread, aligned to 64 bytes.
  FileMover(const Kernels& kernels, uint8_t* scratch, int64_t piece, int threads);
  FileMover(const FileMover&) = delete;
  FileMover& operator=(const FileMover&) = delete;
  ~FileMover() { close(); }

  /// Whether this process created the threads: a fork has no threads, and locks of unknown state.
  bool is_here() const;

  /// Submits moves. The caller keeps descriptors open and memory valid until `wait` returns for the ticket, or `close`.
  uint64_t begin(const std::vector<FileMove>& moves);

  /// Whether `wait` would return at once, now or within `patience`.
  bool is_done(uint64_t ticket, std::chrono::milliseconds patience);

  /// Waits, once for each ticket; returns for each of its moves whether it succeeded.
  std::vector<bool> wait(uint64_t ticket);

  /// Starts no further piece, and joins the threads.
  void close();

 private:
  struct Move {
    std::optional<FilePieces> pieces;
    int64_t next = 0;  // first piece that no thread has taken
    bool failed = false;
  };
  struct Ticket {
    std::vector<Move> moves;
    size_t at = 0;         // the move with the next piece
    int64_t pending = 0;   // pieces not complete yet
  };

  void work(uint8_t* scratch);
  Move* next(Ticket& ticket);
  const std::shared_ptr<Ticket>& find(uint64_t number);

  const Kernels& kernels_;
  const int64_t piece_, process_;

  std::mutex lock_;  // guards all members below
  std::condition_variable more_, done_;
  std::deque<std::shared_ptr<Ticket>> begun_;  // tickets with pieces that no thread has taken
  std::map<uint64_t, std::shared_ptr<Ticket>> tickets_;
  uint64_t last_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

/// Deleter for an owner: in a fork nothing of a mover can be ended, so the fork leaks it.
struct LeftInCopies {
  void operator()(FileMover* mover) const {
    if (mover->is_here()) delete mover;
  }
};

}  // namespace qload::cpu
