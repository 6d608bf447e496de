// Detection of AMX.
#pragma once

namespace qload::cpu {

/// Whether this CPU has tiles of bfloat16, the system saves them at a context switch, and it permits this process to
/// use them. One request serves all threads; a refusal gives false.
bool has_tiles();

}  // namespace qload::cpu
