// SPDX-License-Identifier: Apache-2.0
#include "cuda/model_device.hpp"

#include <k3/k3.cuh>

namespace k3::test {

size planned(const K3CpuModel& model) { return K3DeviceModel::plan(model); }

std::string refuse_buffer(size bytes) {
  try {
    const DeviceBuffer<unsigned char> buffer(bytes);
  } catch (const cuda_error& problem) {
    return problem.what();
  }
  return "";
}

std::string refuse_decoder(const K3CpuModel& model, size rows) {
  const K3DeviceModel moved(model);
  try {
    const DeviceDecoder<Fp32> decoder(gpu{}, moved, 16, rows, rows);
  } catch (const cuda_error& problem) {
    return problem.what();
  }
  return "";
}

std::string refuse_too_large(const K3CpuModel& model, size& needed) {
  needed = K3DeviceModel::plan(model);
  try {
    const K3DeviceModel moved(model);
  } catch (const cuda_error& problem) {
    return problem.what();
  }
  return "";
}

std::string refuse_too_large_experts(const K3CpuModel& model, size& needed) {
  needed = K3DeviceModel::plan_experts(model);
  K3DeviceModel moved(WithoutExperts{}, model);
  try {
    moved.place_experts(needed);
  } catch (const cuda_error& problem) {
    return moved.complete() ? "complete all the same" : problem.what();
  }
  return "";
}

namespace {

detail::DeviceMemory device_memory() {
  detail::check_cuda("test", "synchronise", cudaDeviceSynchronize());
  return detail::device_memory("test");
}

}  // namespace

size free_bytes() { return device_memory().free; }
size total_bytes() { return device_memory().total; }

std::string refuse_cache(const K3CpuModel& model, size slots, size capacity, size& lost) {
  const size before = free_bytes();
  std::string refusal;
  try {
    const DeviceHybridCache<Fp32> cache(nullptr, model.graph, model.config.kda, model.config.mla, slots, capacity);
  } catch (const cuda_error& problem) {
    refusal = problem.what();
  }
  const size after = free_bytes();
  lost = after < before ? before - after : 0;
  return refusal;
}

namespace {

/// Whether device memory holds these bytes.
bool holds(const void* there, const void* here, size bytes) {
  std::vector<unsigned char> values(bytes);
  detail::check_cuda("test", "copy", cudaMemcpy(values.data(), there, bytes, cudaMemcpyDeviceToHost));
  return __builtin_memcmp(values.data(), here, bytes) == 0;
}
template <size Rank>
bool holds(const AnyView<Rank, MemorySpace::device>& there, const AnyView<Rank>& here) {
  bool same = there.type == here.type;
  for (size d = 0; d < Rank; ++d) same = same && there.extents[d] == here.extents[d];
  return same && holds(there.data, here.data, detail::data_bytes(here)) &&
         (here.type != ElementType::mxfp4 || holds(there.scale, here.scale, detail::scale_bytes(here)));
}

/// Both models' weights one by one, as visit(weights, f) visits them.
template <class Host, class Device, class Visit>
std::string differing_weight(Host& host_weights, Device& device_weights, Visit&& visit) {
  std::vector<AnyVector<>> vectors;
  std::vector<AnyMatrix<>> matrices;
  std::string fault;
  size vector = 0, matrix = 0;
  const auto collect = [&](const std::string&, auto& weight, const auto& shape, WeightRole) {
    if constexpr (sizeof(shape) == sizeof(size))
      vectors.push_back(weight);
    else
      matrices.push_back(weight);
  };
  const auto compare = [&](const std::string& name, auto& weight, const auto& shape, WeightRole) {
    bool same;
    if constexpr (sizeof(shape) == sizeof(size))
      same = holds(weight, vectors[vector++]);
    else
      same = holds(weight, matrices[matrix++]);
    if (!same) fault = name;
  };
  visit(host_weights, collect);
  visit(device_weights, compare);
  return fault;
}

std::string differing_expert(const ExpertTable& table, const ExpertSource& experts) {
  std::vector<kernel::ExpertPointers> there(table.experts());
  detail::check_cuda("test", "copy",
                     cudaMemcpy(there.data(), table.data(), there.size() * sizeof(there[0]), cudaMemcpyDeviceToHost));
  if (there.size() != experts.size()) return "the number of experts";
  for (size e = 0; e < there.size(); ++e) {
    const ExpertWeights w = experts[e];
    const auto same = [](const void* data, const void* scale, const AnyMatrix<>& here) {
      return holds(data, here.data, detail::data_bytes(here)) &&
             (here.type != ElementType::mxfp4 || holds(scale, here.scale, detail::scale_bytes(here)));
    };
    if (!same(there[e].w1, there[e].scale1, w.w1) || !same(there[e].w3, there[e].scale3, w.w3) ||
        !same(there[e].w2, there[e].scale2, w.w2))
      return "expert " + std::to_string(e);
  }
  return "";
}

}  // namespace

std::string fault_of_moved_model(const K3CpuModel& model) {
  size done = 0, reports = 0;
  bool backwards = false;
  const size planned = K3DeviceModel::plan(model);
  // What has been read, so that no more can have arrived, and the most that was said beyond it.
  std::atomic<size> read_bytes{0};
  size ahead = 0;
  const auto read = [&](const void* from, size bytes, std::byte* to) {
    CopyWeights{}(from, bytes, to);
    read_bytes += bytes;
  };
  const auto progress = [&](size so_far, size all) {
    backwards = backwards || so_far < done || all != planned;
    if (so_far > read_bytes) ahead = std::max(ahead, so_far - read_bytes);
    done = so_far, ++reports;
  };
  const K3DeviceModel moved(model, progress, read);
  if (backwards || done != planned || reports < model.graph.layers.size() || moved.bytes() != planned)
    return "the plan or its progress";
  if (ahead > planned - read_bytes) return "progress that is ahead of the reads";  // but for what fills up addresses
  DecoderWeights here = model.weights;
  auto& there = const_cast<DeviceDecoderWeights&>(moved.weights());
  std::string fault =
      differing_weight(here, there, [&](auto& w, auto&& f) { for_each_model_weight(model.config, w, f); });
  for (size layer = 0; layer < here.layers.size() && fault.empty(); ++layer) {
    const K3LayerSpec& spec = here.layers[layer].spec;
    if (there.layers[layer].spec != spec) return "a layer's kind";
    fault = differing_weight(here.layers[layer], there.layers[layer],
                             [&](auto& w, auto&& f) { for_each_layer_weight(model.config, spec, w, f); });
    if (fault.empty() && spec.mlp == MlpKind::LatentMoe)
      fault = differing_expert(there.layers[layer].experts, *here.layers[layer].experts);
  }
  return fault;
}

std::shared_ptr<std::byte> pinned(size bytes) { return pinned_memory(bytes); }

size wrong_after_upload(size bytes, bool fails) {
  std::vector<unsigned char> from(bytes + 7);
  for (size i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i ^ i >> 8 ^ i >> 16);
  std::atomic<int> reads{0};
  const auto read = [&](const void* data, size count, std::byte* to) {
    if (reads++ == 2 && fails) throw std::runtime_error("the third read");
    for (size i = 0; i < count; ++i) to[i] = std::byte(static_cast<const unsigned char*>(data)[i] + 1);
  };
  const DeviceBuffer<unsigned char> there(bytes);
  detail::DeviceUpload upload(read);
  size wrong = 0;
  for (int round = 0; round < 2; ++round) {
    const size half = bytes / 2;
    upload.add(there.data(), from.data() + 7 - round, half);
    upload.add(there.data() + half, from.data() + 7 - round + half, bytes - half);
    upload.flush();
    const std::vector<unsigned char> got = there.to_vector();
    for (size i = 0; i < bytes; ++i) wrong += got[i] != static_cast<unsigned char>(from[i + 7 - size(round)] + 1);
  }
  return wrong;
}

std::string left_behind() {
  const cudaError_t code = cudaGetLastError();
  return code == cudaSuccess ? "" : cudaGetErrorString(code);
}

}  // namespace k3::test
