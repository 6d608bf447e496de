// The mover of files with kernels that only copy: drawn moves and reads, what fails, and what is closed in the middle.
// Ends with 1 at the first thing that is not as it should be; sanitizers watch it.
#include "../../../csrc/cpu/file_mover.h"
#include "../drawn_file.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

using namespace qload::cpu;

/// What the system may do at any time: read less than it was asked for, or be interrupted.
extern "C" ssize_t pread(int descriptor, void* to, size_t bytes, off_t offset) {
  static std::atomic<int> calls{0};
  const int call = ++calls;
  if (call % 7 == 0) return errno = EINTR, -1;
  const iovec some{to, call % 3 ? bytes : (bytes + 1) / 2};
  return preadv(descriptor, &some, 1, offset);
}

namespace {

constexpr int64_t kFile = 1 << 22, kPiece = 1 << 14;

/// Of plans that leave all in order.
void copy_tiles(const Plan& plan, const uint8_t* from, uint8_t* to, int64_t begin, int64_t end, bool) {
  const int64_t tile = int64_t{plan.registers} * plan.width;
  std::memcpy(to + begin * tile, from + begin * tile, static_cast<size_t>((end - begin) * tile));
}

Kernels only_copying() {
  Kernels made{};
  made.widest = 64;
  made.run = copy_tiles;
  made.fence = [] {};
  return made;
}

struct Desk {
  Kernels kernels = only_copying();
  Bytes scratch;
  FileMover mover;

  explicit Desk(int threads) : scratch(threads * kPiece), mover(kernels, scratch.data(), kPiece, threads) {}
};

/// So many bytes, which move by digits that leave them in order, or are read.
FileMove whole(const File& file, int64_t at, int64_t count, Bytes& to, bool moved) {
  to.assign(static_cast<size_t>(count + 1), kUntouched);
  std::vector<qload::Digit> digits;
  if (moved) digits = {{1024, 1, 1}, {count / 1024, 1024, 1024}};
  return {8, digits, {file.descriptor, at, count}, to.data()};
}

struct Load {
  std::vector<Bytes> out;
  std::vector<FileMove> moves;
  uint64_t ticket;

  Load(Desk& desk, const File& file, std::mt19937& random) : out(random() % 5) {
    for (Bytes& each : out) {
      const bool moved = random() % 2;
      const int64_t count = moved ? 1024 << random() % 8 : random() % (random() % 2 ? 600 : 9 * kPiece);
      moves.push_back(whole(file, random() % (kFile - count), count, each, moved));
    }
    ticket = desk.mover.begin(moves);
  }
  void compare(Desk& desk, const File& file) {
    while (out.size() % 2 && !desk.mover.is_done(ticket, std::chrono::milliseconds(1))) {
    }
    const std::vector<bool> made = desk.mover.wait(ticket);
    check(made == std::vector<bool>(out.size(), true), "all was moved");
    for (size_t i = 0; i < out.size(); ++i) {
      const FileBytes& from = moves[i].from;
      check(!std::memcmp(out[i].data(), &file.bytes[from.begin], from.count), "it is what the file has");
      check(out[i].back() == kUntouched, "nothing beside it was written");
    }
  }
};

void moves_are_what_files_hold(const File& file, std::mt19937& random) {
  Desk desk(1 + random() % 6);
  std::deque<Load> begun;
  for (int i = 0; i < 20; ++i) {
    begun.emplace_back(desk, file, random);
    while (begun.size() > random() % 6) {
      begun.front().compare(desk, file);
      begun.pop_front();
    }
  }
  while (!begun.empty()) begun.front().compare(desk, file), begun.pop_front();
}

void what_fails_is_told(const File& file) {
  Desk desk(3);
  Bytes a, b, c, d;
  const FileMove good = whole(file, 0, 1 << 16, a, true);
  FileMove none = whole(file, 0, 1 << 16, b, true), beyond = whole(file, 0, 1 << 16, c, false);
  none.from.descriptor = -5;
  beyond.from.begin = kFile - 100;
  FileMove other = whole(file, 0, 1 << 16, d, true);
  other.from.count -= 1;
  const std::vector<bool> made = desk.mover.wait(desk.mover.begin({none, good, beyond, other}));
  check(made == std::vector<bool>{false, true, false, false}, "each is told");
  check(desk.mover.wait(desk.mover.begin({})).empty(), "nothing is moved at once");
  bool refused = false;
  try {
    desk.mover.wait(1);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  check(refused, "a ticket is waited for once");
}

void what_was_closed_moves_nothing(const File& file) {
  std::vector<Bytes> outs(40);  // one for each ticket, as a thread may be late with a piece of the one before
  Desk desk(2);
  std::vector<FileMove> moves;
  for (Bytes& out : outs) moves.push_back(whole(file, 0, kFile, out, true));
  std::vector<uint64_t> tickets;
  for (const FileMove& all : moves) tickets.push_back(desk.mover.begin({all}));
  desk.mover.close();
  for (Bytes& out : outs) std::fill(out.begin(), out.end(), kUntouched);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  for (const Bytes& out : outs) check(out == Bytes(out.size(), kUntouched), "nothing was written after it was closed");
  tickets.pop_back();  // which nobody waits for
  int dropped = 0;
  for (const uint64_t ticket : tickets) dropped += !desk.mover.wait(ticket)[0];
  check(dropped > 0, "what no thread had begun was dropped");
  check(!desk.mover.wait(desk.mover.begin({moves[0]}))[0], "nothing more is begun");
}

}  // namespace

int main() {
  std::mt19937 random(20);
  const File file(random, kFile);
  for (int i = 0; i < 8; ++i) {
    moves_are_what_files_hold(file, random);
    what_fails_is_told(file);
    what_was_closed_moves_nothing(file);
  }
}
