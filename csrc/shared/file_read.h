// Files read at positions, by threads of our own. Systems without such reads have neither.
#pragma once

#ifndef _WIN32

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace qload {

/// 0: all was read; -1: the file ended before; else errno.
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

/// Where threads begin: signals go to the threads of the program, which know what they mean.
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
