// For code that moves pointers and computes nothing but sizes: the storage types of few bits, and quotients rounded down.
#pragma once
#include <stdint.h>

namespace dicp {
struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };
struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };
struct complex32 { half re, im; };
struct complex64 { float re, im; };
struct complex128 { double re, im; };
template <class T> inline T div_floor(T a, T b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
template <class T> inline T remainder(T a, T b) { return a - div_floor<T>(a, b) * b; }
}  // namespace dicp
