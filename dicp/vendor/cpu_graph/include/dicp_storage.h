// The 16-bit storage types, for code that moves pointers to them and computes nothing.
#pragma once
#include <stdint.h>

namespace dicp {
struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };
}  // namespace dicp
