// The reader of files on a device that is none: drawn loads, what fails, and what is closed in the middle. Ends with 1
// at the first thing that is not as it should be; sanitizers watch it.
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../../../csrc/cuda/copy/file_reader.h"
#include "../drawn_file.h"

using namespace qload::cuda;

std::atomic<bool> disk_sleeps{false};

/// What the system may do at any time: read late, read less than it was asked for, or be interrupted.
extern "C" ssize_t pread(int descriptor, void* to, size_t bytes, off_t offset) {
  while (disk_sleeps) std::this_thread::yield();
  static std::atomic<int> calls{0};
  const int call = ++calls;
  if (call % 7 == 0) return errno = EINTR, -1;
  const iovec some{to, call % 3 ? bytes : (bytes + 1) / 2};
  return preadv(descriptor, &some, 1, offset);
}

namespace {

constexpr size_t kFile = 1 << 20;

/// A reader with pinned memory of its own, a stream at home and another one.
struct Desk {
  std::vector<char> memory;
  cudaStream_t home, other;
  FileReader reader;

  Desk(int threads, size_t run)
      : memory(threads * FileReader::BUFFERS * run), home(new CUstream_st), other(new CUstream_st),
        reader(memory.data(), run, threads) {}
  ~Desk() {
    reader.close();  // before the streams end that events are waited for on
    delete home;
    delete other;
  }
  uint64_t begin(const std::vector<FileRange>& ranges) {
    uint64_t ticket = 0;
    check(reader.begin(ranges, home, &ticket) == cudaSuccess, "reads can be begun");
    return ticket;
  }
  Failure wait(uint64_t ticket) { return reader.wait(ticket, home); }
};

struct Load {
  std::vector<Bytes> out;
  std::vector<FileRange> ranges;
  uint64_t ticket;

  Load(Desk& desk, const File& file, size_t run, std::mt19937& random) : out(random() % 6) {
    for (Bytes& each : out) {
      size_t bytes = random() % (random() % 3 ? 600 : 5 * run);
      if (random() % 2) bytes = (bytes + 255) / 256 * 256;  // runs of such a length share a copy
      const int64_t runs = 1 + random() % (random() % 2 ? 1 : 5), distance = bytes + random() % 900;
      const size_t at = random() % (kFile - runs * distance);
      each.assign(runs * bytes + 1, 0);
      ranges.push_back({file.descriptor, static_cast<int64_t>(at), bytes, each.data(), runs, distance});
    }
    for (Bytes& each : out) {  // until home is there its bytes belong to who had them before
      Bytes* const used = &each;
      desk.home->ask([=] { std::fill(used->begin(), used->end(), kUntouched); });
    }
    ticket = desk.begin(ranges);
  }
  void compare(Desk& desk, const File& file, cudaStream_t stream) const {
    if (ranges.size() % 2) {
      while (!desk.reader.is_read(ticket, std::chrono::milliseconds(1))) {
      }
    }
    const Failure failure = desk.reader.wait(ticket, stream);
    check(failure.range == -1 && !failure.system && failure.device == cudaSuccess, "all was read");
    stream->synchronize();
    for (size_t i = 0; i < ranges.size(); ++i) {
      for (int64_t run = 0; run < ranges[i].runs; ++run) {
        const char* const want = reinterpret_cast<const char*>(&file.bytes[ranges[i].offset + run * ranges[i].distance]);
        check(!std::memcmp(out[i].data() + run * ranges[i].bytes, want, ranges[i].bytes), "it is what the file has");
      }
      check(out[i].back() == kUntouched, "nothing beside it was written");
    }
  }
};

void loads_are_what_files_hold(const File& file, std::mt19937& random) {
  const size_t run = FileReader::ALIGNED * (1 + random() % 64);
  Desk desk(1 + random() % 6, run);
  std::deque<Load> begun;
  for (int i = 0; i < 20; ++i) {
    begun.emplace_back(desk, file, run, random);
    while (begun.size() > random() % 6) {
      begun.front().compare(desk, file, random() % 2 ? desk.home : desk.other);
      begun.pop_front();
    }
  }
  while (!begun.empty()) begun.front().compare(desk, file, desk.home), begun.pop_front();
}

void what_fails_is_named(const File& file) {
  Desk desk(3, 4 * FileReader::ALIGNED);
  const auto size = static_cast<int64_t>(kFile);
  Bytes a(9000), b(9000);
  Failure failure = desk.wait(desk.begin({{file.descriptor, 0, 9000, a.data()},
                                          {file.descriptor, size - 100, 101, b.data()},
                                          {file.descriptor, size - 50, 900, b.data()}}));
  check(failure.range == 1 && !failure.system && failure.device == cudaSuccess, "a file that ended");
  failure = desk.wait(desk.begin({{file.descriptor, 0, 9000, a.data()}, {-5, 0, 9000, b.data()}}));
  check(failure.range == 1 && failure.system == EBADF, "no such descriptor");
  device().copies_until_failure = 4;
  const uint64_t ticket = desk.begin({{file.descriptor, 0, 9000, a.data()}});
  failure = desk.wait(ticket);
  check(failure.range == 0 && failure.device == cudaErrorUnknown, "a copy that failed");
  desk.home->ask([&] { std::fill(a.begin(), a.end(), kUntouched); });  // which waits for the copies that did not fail
  desk.home->synchronize();
  check(a == Bytes(a.size(), kUntouched), "no copy came later");
  bool refused = false;
  try {
    desk.wait(ticket);
  } catch (const std::runtime_error&) {
    refused = true;
  }
  check(refused, "a ticket is waited for once");
  refused = false;
  try {
    desk.reader.is_read(ticket, std::chrono::milliseconds(0));
  } catch (const std::runtime_error&) {
    refused = true;
  }
  check(refused, "and asked for no more");
  check(desk.wait(desk.begin({})).range == -1, "nothing is read at once");
  check(desk.wait(desk.begin({{file.descriptor, 7, 0, a.data()}})).range == -1, "and so are no bytes");
}

void whoever_waits_can_look_up_meanwhile(const File& file) {
  Bytes out(9000);
  Desk desk(2, 4 * FileReader::ALIGNED);
  disk_sleeps = true;
  const uint64_t ticket = desk.begin({{file.descriptor, 0, 9000, out.data()}});
  check(!desk.reader.is_read(ticket, std::chrono::milliseconds(1)), "nothing can be read yet");
  disk_sleeps = false;
  while (!desk.reader.is_read(ticket, std::chrono::milliseconds(1))) {
  }
  check(desk.wait(ticket).range == -1, "all was read");
}

void what_was_closed_reads_nothing(const File& file) {
  Bytes out(kFile);
  Desk desk(2, 16 * FileReader::ALIGNED);
  std::vector<uint64_t> tickets;
  for (int i = 0; i < 20; ++i) tickets.push_back(desk.begin({{file.descriptor, 0, kFile, out.data()}}));
  check(desk.reader.close() == cudaSuccess, "it can be closed");
  std::fill(out.begin(), out.end(), kUntouched);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  check(out == Bytes(kFile, kUntouched), "no copy came after it was closed");
  tickets.pop_back();  // which nobody waits for
  int dropped = 0;
  for (const uint64_t ticket : tickets) {
    const Failure failure = desk.wait(ticket);
    check(failure.range < 0 || failure.system == ECANCELED, "read, or said to be dropped");
    dropped += failure.range >= 0;
  }
  check(dropped > 0, "what no thread had begun was dropped");
  check(desk.wait(desk.begin({{file.descriptor, 0, 9, out.data()}})).system == ECANCELED, "nothing more is begun");
}

}  // namespace

int main() {
  std::mt19937 random(20);
  const File file(random, kFile);
  for (int i = 0; i < 8; ++i) {
    loads_are_what_files_hold(file, random);
    what_fails_is_named(file);
    whoever_waits_can_look_up_meanwhile(file);
    what_was_closed_reads_nothing(file);
    check(device().held == 0, "all streams and events were given back");
    check(device().left == 0, "and nothing was left for them to do");
  }
}
