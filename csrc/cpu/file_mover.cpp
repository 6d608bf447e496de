#include "file_mover.h"

#include <stdexcept>
#include <utility>

#include "../shared/file_read.h"

namespace qload::cpu {
namespace {

int64_t this_process() {
#ifndef _WIN32
  return getpid();
#else
  return 0;
#endif
}

}  // namespace

FileMover::FileMover(const Kernels& kernels, uint8_t* scratch, int64_t piece, int threads)
    : kernels_(kernels), piece_(piece), process_(this_process()) {
  if (piece < 1 || threads < 1) throw std::invalid_argument("a mover of files needs a thread and room for a piece");
  try {
#ifndef _WIN32
    const SignalsBlocked blocked;
#endif
    for (int i = 0; i < threads; ++i) threads_.emplace_back(&FileMover::work, this, scratch + i * piece);
  } catch (...) {
    close();
    throw;
  }
}

bool FileMover::is_here() const { return process_ == this_process(); }

uint64_t FileMover::begin(const std::vector<FileMove>& moves) {
  auto ticket = std::make_shared<Ticket>();
  for (const auto& [bits, digits, from, to] : moves) {
    Move move{FilePieces::of(kernels_, bits, digits, from, to, piece_)};
    move.failed = !move.pieces;
    if (move.pieces) ticket->pending += move.pieces->count();
    ticket->moves.push_back(std::move(move));
  }
  uint64_t number = 0;
  {
    const std::lock_guard<std::mutex> held(lock_);
    if (closing_) {
      for (Move& move : ticket->moves) move.failed = true;
      ticket->pending = 0;
    }
    if (ticket->pending) begun_.push_back(ticket);
    tickets_[number = ++last_] = std::move(ticket);
  }
  more_.notify_all();
  return number;
}

bool FileMover::is_done(uint64_t number, std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> held(lock_);
  const std::shared_ptr<Ticket> ticket = find(number);
  return done_.wait_for(held, patience, [&] { return !ticket->pending; });
}

std::vector<bool> FileMover::wait(uint64_t number) {
  std::unique_lock<std::mutex> held(lock_);
  const std::shared_ptr<Ticket> ticket = find(number);
  tickets_.erase(number);
  done_.wait(held, [&] { return !ticket->pending; });
  std::vector<bool> made;
  for (const Move& move : ticket->moves) made.push_back(!move.failed);
  return made;
}

void FileMover::close() {
  {
    const std::lock_guard<std::mutex> held(lock_);
    closing_ = true;
    for (const auto& ticket : begun_)
      for (Move& move : ticket->moves)
        if (move.pieces && move.next < move.pieces->count()) {
          ticket->pending -= move.pieces->count() - std::exchange(move.next, move.pieces->count());
          move.failed = true;
        }
    begun_.clear();
  }
  more_.notify_all();
  done_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void FileMover::work(uint8_t* scratch) {
  std::unique_lock<std::mutex> held(lock_);
  for (;;) {
    more_.wait(held, [&] { return closing_ || !begun_.empty(); });
    if (begun_.empty()) return;
    const std::shared_ptr<Ticket> ticket = begun_.front();
    Move* const move = next(*ticket);
    if (!move) {
      begun_.pop_front();
      continue;
    }
    const int64_t piece = move->next++;
    const bool skipped = move->failed;
    held.unlock();
    const bool made = !skipped && move->pieces->move(piece, scratch);
    held.lock();
    if (!made) move->failed = true;
    if (!--ticket->pending) done_.notify_all();
  }
}

/// The first move of a ticket with a piece left for a thread, or nullptr.
FileMover::Move* FileMover::next(Ticket& ticket) {
  for (; ticket.at < ticket.moves.size(); ++ticket.at) {
    Move& move = ticket.moves[ticket.at];
    if (move.pieces && move.next < move.pieces->count()) return &move;
  }
  return nullptr;
}

const std::shared_ptr<FileMover::Ticket>& FileMover::find(uint64_t number) {
  const auto found = tickets_.find(number);
  if (found == tickets_.end()) throw std::invalid_argument("a ticket that was waited for, or never was");
  return found->second;
}

}  // namespace qload::cpu
