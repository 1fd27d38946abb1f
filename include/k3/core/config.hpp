// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Every macro of the library. Nothing else in k3 defines one.

#if defined(_MSVC_LANG) ? (_MSVC_LANG < 202002L) : (__cplusplus < 202002L)
#error "k3 needs C++20: compile with -std=c++20 or newer."
#endif

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "k3 needs NaN and a fixed order of additions: compile without -ffast-math and -ffinite-math-only."
#endif

/// A function that both a host compiler and nvcc's device pass accept.
#if defined(__CUDACC__)
#define K3_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define K3_HOST_DEVICE inline
#endif

/// `#pragma omp ...` where OpenMP is on, nothing elsewhere: the code is then serial and still correct.
#if defined(_OPENMP)
#define K3_PRAGMA_OMP(directive) _Pragma(#directive)
#else
#define K3_PRAGMA_OMP(directive)
#endif

/// Vector code for x86-64 is compiled per function and chosen at run time (core/isa.hpp); 0 on other machines.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define K3_X86_64 1
#define K3_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define K3_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#else
#define K3_X86_64 0
#define K3_TARGET_AVX2
#define K3_TARGET_AVX512
#endif
