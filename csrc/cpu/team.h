// Threads for one call: those of torch's own operations, or new ones.
//
// The threads of an OpenMP runtime spin for a while after each operation. Other threads would compete with them for the
// cores; so calls between operations of torch run on the same threads.
#pragma once

namespace qload::cpu {

/// Whether calls run on the threads of torch's OpenMP runtime. False if torch uses none, or if this process is a fork
/// and so has none of its threads.
bool is_on_threads_of_torch();

/// Calls `share(of)` on at most `threads` threads at once, including this one; returns when all have returned.
/// `share` must not throw.
void on_threads(int threads, void (*share)(void*), void* of);

}  // namespace qload::cpu
