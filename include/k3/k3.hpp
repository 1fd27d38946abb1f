// SPDX-License-Identifier: Apache-2.0
#pragma once
/// All of k3 that a plain C++ compiler takes: number formats, geometry, formulae, operations and the decoder. The readers
/// of files are apart, in k3/io, since they need libraries; the CUDA backend comes with <k3/k3.cuh>.

#include <k3/core/any_view.hpp>
#include <k3/core/bf16.hpp>
#include <k3/core/config.hpp>
#include <k3/core/environment.hpp>
#include <k3/core/error.hpp>
#include <k3/core/execution.hpp>
#include <k3/core/isa.hpp>
#include <k3/core/mxfp4.hpp>
#include <k3/core/precision.hpp>
#include <k3/core/types.hpp>
#include <k3/core/view.hpp>
#include <k3/formula/activation.hpp>
#include <k3/formula/rms_norm.hpp>
#include <k3/geometry/decoder_geometry.hpp>
#include <k3/geometry/k3_config.hpp>
#include <k3/geometry/k3_graph.hpp>
#include <k3/geometry/kda_config.hpp>
#include <k3/geometry/latent_moe_config.hpp>
#include <k3/geometry/mla_config.hpp>
#include <k3/geometry/presets.hpp>
#include <k3/model/ablation.hpp>
#include <k3/model/weights.hpp>
#include <k3/ops/linear.hpp>
#include <k3/ops/reduce.hpp>
#include <k3/ops/rms_norm.hpp>
#include <k3/ops/row_status.hpp>
#include <k3/ops/situ_glu.hpp>
#include <k3/version.hpp>
