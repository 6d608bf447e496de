// What programs have in common that try threads which read files.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using Bytes = std::vector<uint8_t>;

constexpr uint8_t kUntouched = 77;

inline void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

/// A file of random bytes.
struct File {
  std::FILE* stream = std::tmpfile();  // which has no name, and ends with its stream
  int descriptor;
  Bytes bytes;

  File(std::mt19937& random, int64_t size) : bytes(static_cast<size_t>(size)) {
    for (auto& byte : bytes) byte = static_cast<uint8_t>(random());
    check(stream, "a file can be made");
    descriptor = fileno(stream);
    check(write(descriptor, bytes.data(), bytes.size()) == static_cast<ssize_t>(size), "it can be written");
  }
  ~File() { std::fclose(stream); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
};
