// The OpenMP runtime of torch, looked up among the libraries of this process and not linked.
#include "team.h"

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#ifdef __linux__
#include <dlfcn.h>
#include <pthread.h>

#include <cstdio>
#endif

namespace qload::cpu {
namespace {

/// GCC's entry to a parallel region: a function for each thread, its argument, the number of threads, flags. Other
/// runtimes on Linux have it too.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

#ifdef __linux__
std::atomic<bool> forked{false};
const bool watched = !pthread_atfork(nullptr, nullptr, [] { forked = true; });  // registered when the module is loaded

/// Whether this process is a fork of another, by its flags in Linux; true if they cannot be read.
bool is_copy() {
  constexpr unsigned long kForkedAndNotReplaced = 0x40;
  std::FILE* const file = std::fopen("/proc/self/stat", "r");
  if (!file) return true;
  unsigned long flags = kForkedAndNotReplaced;
  const int read = std::fscanf(file, "%*d (%*[^)]%*[)] %*c %*d %*d %*d %*d %*d %lu", &flags);
  std::fclose(file);
  return read != 1 || (flags & kForkedAndNotReplaced);
}

Parallel find() {
  if (is_copy()) return nullptr;  // in a fork torch may take its parent's threads for its own
  void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);  // never closed: the runtime stays in use
  if (!torch) return nullptr;
  return reinterpret_cast<Parallel>(dlsym(torch, "GOMP_parallel"));  // from torch or its dependencies
}

Parallel parallel() {
  static const Parallel found = find();
  return watched && !forked ? found : nullptr;
}
#else
Parallel parallel() { return nullptr; }
#endif

/// Joins its threads in every exit from a block: a thread without a join would end the process.
struct Joined {
  std::vector<std::thread> threads;
  ~Joined() {
    for (auto& each : threads) each.join();
  }
};

}  // namespace

bool is_on_threads_of_torch() { return parallel() != nullptr; }

void on_threads(int threads, void (*share)(void*), void* of) {
  if (const Parallel region = parallel()) return region(share, of, static_cast<unsigned>(threads), 0);
  Joined others;
  try {
    others.threads.reserve(static_cast<size_t>(threads));
    for (int thread = 1; thread < threads; ++thread) others.threads.emplace_back(share, of);
  } catch (const std::exception&) {  // no more threads, or no memory: the existing ones do the work
  }
  share(of);
}

}  // namespace qload::cpu
