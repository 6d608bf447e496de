// Reads of files at positions, on this library's own threads. A system without `pread` has neither.
#pragma once

#ifndef _WIN32

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace qload {

/// Returns 0 if it read all bytes, -1 if the file ended before, else errno.
inline int read_all(int descriptor, int64_t offset, void* memory, size_t bytes) {
  char* to = static_cast<char*>(memory);
  while (bytes) {
    const ssize_t count = pread(descriptor, to, bytes, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    if (count == 0) return -1;
    to += count, offset += count, bytes -= static_cast<size_t>(count);
  }
  return 0;
}

/// Blocks signals while threads are created, so that the program's own threads receive them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace qload

#endif
