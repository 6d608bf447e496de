// Whether this process may use the tiles of AMX.
#pragma once

namespace qload::cpu {

/// Whether this CPU has tiles of bfloat16, the system keeps them when threads change, and it lets this process use them:
/// it is asked once, for all threads. A refusal is a no.
bool has_tiles();

}  // namespace qload::cpu
