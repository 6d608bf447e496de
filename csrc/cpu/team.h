// Threads for one call: those that torch's own operations use, or new ones.
//
// The threads of an OpenMP runtime wait busily for a while after each operation. Others beside them would have
// to share the cores with them, so that calls between operations of torch are made on the same threads.
#pragma once

namespace qload::cpu {

/// Whether calls are made on the threads of the OpenMP runtime that torch uses. False: it uses none, or this
/// process was forked, which leaves none of its threads.
bool is_on_threads_of_torch();

/// `share(of)` on at most `threads` threads at once, of which this is one; returns when all have returned.
/// `share` throws nothing.
void on_threads(int threads, void (*share)(void*), void* of);

}  // namespace qload::cpu
