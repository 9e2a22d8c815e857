// The 16-bit storage types, for code that only passes pointers to them.
#pragma once
#include <stdint.h>

namespace dicp {
struct bf16;
struct half;
}  // namespace dicp
