#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Without a GPU a program gets one sentence that says what is missing and what to do, as a cuda_error that names the
# operation; the examples print it and fail.
# shellcheck source=tests/packaging/common.sh
. "$(dirname "$0")/common.sh"

command -v nvcc >/dev/null 2>&1 || skip 'no nvcc: nothing is compiled'
export CUDA_VISIBLE_DEVICES=-1  # also where there is a GPU
flags=(-std=c++20 -Wno-deprecated-gpu-targets -I"$root/include" -I"$root/kernels")

cat >"$scratch/stream.cu" <<'END'
#include <k3/cuda/buffer.cuh>
#include <k3/cuda/stream.cuh>

#include <cstdio>
#include <cstring>

int failures = 0;

// What `work` throws names the operation and says one of the words.
template <class Work>
void expect(const char* operation, const char* words, const char* other_words, Work work) {
  try {
    work();
    std::printf("%s: no error\n", operation);
  } catch (const k3::cuda_error& problem) {
    std::printf("%s\n", problem.what());
    const bool said = std::strstr(problem.what(), words) || std::strstr(problem.what(), other_words);
    if (problem.operation() == operation && problem.code() != 0 && said) return;
  }
  ++failures;
}

int main() {
  const char *no_gpu = "no NVIDIA GPU can be seen here", *no_driver = "no NVIDIA driver here";
  expect("DeviceStream", no_gpu, no_driver, [] { k3::DeviceStream stream; });
  expect("DeviceBuffer", no_gpu, no_driver, [] { k3::DeviceBuffer<float> buffer(4); });
  const auto code = [](cudaError_t which) { return [=] { k3::detail::check_cuda("test", "call", which); }; };
  expect("test", no_gpu, no_gpu, code(cudaErrorNoDevice));
  expect("test", no_driver, no_driver, code(cudaErrorInsufficientDriver));
  expect("test", "nvcc -gencode", "nvcc -gencode", code(cudaErrorNoKernelImageForDevice));
  expect("test", "nvcc -gencode", "nvcc -gencode", code(cudaErrorUnsupportedPtxVersion));
  expect("test", cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory", code(cudaErrorMemoryAllocation));
  return failures;
}
END
quietly nvcc "${flags[@]}" "$scratch/stream.cu" -o "$scratch/stream"
quietly "$scratch/stream"
sed 1q "$scratch/output"

quietly nvcc "${flags[@]}" "$root/examples/rms_norm.cu" -o "$scratch/rms_norm"
said=$("$scratch/rms_norm") && fail "the example succeeds without a GPU: $said"
grep -q 'no NVIDIA' <<<"$said" || fail "the example does not say what is missing: $said"
