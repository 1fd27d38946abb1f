// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Everything of k3.hpp and the CUDA backend: the same operations on `k3::gpu{stream}` and device views.

#include <k3/cuda/device_decoder.cuh>
#include <k3/cuda/launch_k3_kda_decode_token.cuh>
#include <k3/cuda/launch_k3_mla_decode_token.cuh>
#include <k3/k3.hpp>
