// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/async.cuh>
#include <k3/kernels/common.cuh>
#include <k3/kernels/wgmma.cuh>

// The instructions of sm_90a that MLA's attention is built of, beside async.cuh: matrix products of a warpgroup whose
// operands lie in shared memory, barriers of some of a block's threads.
namespace k3::kernel {

/// What all threads of a warp hold alike, in a way that tells the compiler: what is computed from it stays in uniform
/// registers, where products and copies want their operands' addresses.
__device__ __forceinline__ unsigned uniform(unsigned x) { return __reduce_or_sync(full_warp, x); }

/// Waits for `Threads` threads at hardware barrier `id`. A warp comes as one.
template <unsigned Threads>
__device__ __forceinline__ void group_sync(unsigned id) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
/// As above; whether `value` holds for any of them.
template <unsigned Threads>
__device__ __forceinline__ bool group_any(unsigned id, bool value) {
  unsigned any;
  asm volatile(
      "{.reg .pred mine, all; setp.ne.u32 mine, %1, 0;\n"
      "bar.red.or.pred all, %2, %3, mine; selp.u32 %0, 1, 0, all;}\n"
      : "=r"(any)
      : "r"(static_cast<unsigned>(value)), "r"(id), "n"(Threads)
      : "memory");
  return any != 0;
}

/// Two transposed 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8 % 2.
__device__ __forceinline__ void store_transposed(unsigned address, unsigned a, unsigned b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}
/// Four of them; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_transposed(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
/// Four 8 x 8 matrices as they are, to shared memory and from there; the same addresses.
__device__ __forceinline__ void store_matrices(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void load_matrices(unsigned address, unsigned (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
/// A store in the order of the program, so that few registers hold what it needs.
__device__ __forceinline__ void store_float(float* to, float x) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Operands: rows of 128 bytes whose 16-byte pieces are permuted within 8 rows, 1024 bytes from 8 rows to the next. The
/// upper half of their description, and the lower one of an operand at a shared address.
inline constexpr unsigned wgmma_layout = 1u << 30 | 1024 / 16;
__device__ __forceinline__ unsigned wgmma_operand(unsigned address) { return 1u << 16 | (address & 0x3ffff) >> 4; }

// d [64, n] (+)= a [64, 16] b [16, n]: bf16 operands, b by columns, a by rows or, Transposed, by columns. Of row
// warp * 16 + lane / 4 + 8 i and column 8 j + lane % 4 * 2 + e, a thread has d[4 j + 2 i + e].
template <int Transposed>
__device__ __forceinline__ void wgmma_24(float (&d)[12], unsigned a, unsigned b, bool add) {
  asm volatile(
      "{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %14, 0;\n"
      "mov.b64 a, {%12, %16}; mov.b64 b, {%13, %16};\n"
      "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
      "}, a, b, p, 1, 1, %15, 0;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
      : "r"(a), "r"(b), "r"(static_cast<unsigned>(add)), "n"(Transposed), "n"(wgmma_layout));
}
template <int Transposed>
__device__ __forceinline__ void wgmma_48(float (&d)[24], unsigned a, unsigned b, bool add) {
  asm volatile(
      "{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %26, 0;\n"
      "mov.b64 a, {%24, %28}; mov.b64 b, {%25, %28};\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
      "}, a, b, p, 1, 1, %27, 0;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
      : "r"(a), "r"(b), "r"(static_cast<unsigned>(add)), "n"(Transposed), "n"(wgmma_layout));
}
template <int Transposed>
__device__ __forceinline__ void wgmma_96(float (&d)[48], unsigned a, unsigned b, bool add) {
  asm volatile(
      "{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %50, 0;\n"
      "mov.b64 a, {%48, %52}; mov.b64 b, {%49, %52};\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
      "}, a, b, p, 1, 1, %51, 0;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
      : "r"(a), "r"(b), "r"(static_cast<unsigned>(add)), "n"(Transposed), "n"(wgmma_layout));
}

/// d [64, 64] (+)= a b: a's 16-row bands in registers of a warp each, as ldmatrix gives them; b by columns.
__device__ __forceinline__ void wgmma_64(float (&d)[32], const unsigned (&a)[4], unsigned b, bool add) {
  asm volatile(
      "{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %37, 0;\n"
      "mov.b64 b, {%36, %38};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, b, p, 1, 1, 0;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<unsigned>(add)), "n"(wgmma_layout));
}

template <int Transposed, int N>
__device__ __forceinline__ void wgmma(float (&d)[N], unsigned a, unsigned b, bool add) {
  static_assert(N == 12 || N == 24 || N == 48);
  if constexpr (N == 12)
    wgmma_24<Transposed>(d, a, b, add);
  else if constexpr (N == 24)
    wgmma_48<Transposed>(d, a, b, add);
  else
    wgmma_96<Transposed>(d, a, b, add);
}

}  // namespace k3::kernel
