// SPDX-License-Identifier: Apache-2.0
// Built for another kind of GPU than the one at hand: see tests/gpu.sh.
#include "cuda/missing_device.hpp"

#include <k3/geometry/presets.hpp>

#include "cuda/every_operation.cuh"
#include "cuda/graph.cuh"

namespace k3::test {

bool has_kernels() { return code_for_this_device() == cudaSuccess; }

namespace {

/// What is wrong with the error of `work`, whose kernels are missing; empty for nothing.
template <class Work>
std::string fault_of(Work&& work) {
  try {
    work();
    return "no error";
  } catch (const cuda_error& e) {
    const auto code = static_cast<cudaError_t>(e.code());
    if (code != cudaErrorNoKernelImageForDevice && code != cudaErrorInvalidDeviceFunction) return e.what();
    if (e.operation().empty()) return "an error without the operation's name";
  } catch (const std::exception& e) {
    return e.what();
  }
  const cudaError_t left = cudaGetLastError();
  return left == cudaSuccess ? "" : std::string("left behind: ") + cudaGetErrorString(left);
}

}  // namespace

std::vector<std::string> faults_of_missing_kernels(std::vector<std::string>& operations) {
  K3Config config = three_layers(runtime_geometry(tiny::Decoder{}));
  std::vector<std::string> faults;
  const auto check_that = [&](const std::string& name, auto&& work) {
    const std::string fault = fault_of(work);
    if (!fault.empty()) faults.push_back(name + ": " + fault);
  };
  // This workspace asks for shared memory for its kernels when it is made; one for a wider latent has other kernels.
  operations.push_back("MlaDeviceWorkspace");
  check_that("MlaDeviceWorkspace", [&] { const MlaDeviceWorkspace<Bf16> workspace(config.mla, 1, 40); });
  config.mla.kv_lora_rank = kernel::mla_widest_latent + 8;

  const RandomModel model(config, 2);
  EveryOperation all(model, 3, 40, 1);
  const Stream stream;
  for (const EveryOperation::Call& call : all.calls) {
    operations.push_back(call.name);
    const auto run = [&] { call.run(gpu{stream}, all.rows()); };
    check_that(call.name, run);
    check_that(call.name + " in a capture", [&] { replay(stream, 1, run, [] {}); });
    if (stream.capturing()) faults.push_back(call.name + ": still capturing");
    // What needs no kernel still works.
    all.restore(stream);
    stream.wait();
  }
  return faults;
}

}  // namespace k3::test
