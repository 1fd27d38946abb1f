// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include <k3/cuda/repack_experts.cuh>
#include <k3/cuda/stream.cuh>
#include <k3/model/weights.hpp>

namespace k3::detail {

/// Tensors start on multiples of this many bytes, so that every vector load is possible.
inline constexpr size device_alignment = 256;

/// a + b and a * b in a memory plan; they throw invalid_argument where it does not fit 64 bits.
inline size plan_sum(size a, size b) {
  require(a <= ~size{0} - b, "K3DeviceModel", "the weights' size", "too large", "below 2^64 bytes");
  return a + b;
}
inline size plan_product(size a, size b) { return checked_product("K3DeviceModel", "the weights' size", a, b); }

inline size aligned_bytes(size bytes) {
  return plan_sum(bytes, device_alignment - 1) / device_alignment * device_alignment;
}

template <size Rank, MemorySpace Space>
size element_count(const AnyView<Rank, Space>& weight) {
  size count = 1;
  for (size d = 0; d < Rank; ++d) count = plan_product(count, weight.extents[d]);
  return count;
}

/// Bytes of a weight's elements, or of an MXFP4 matrix's codes.
template <size Rank, MemorySpace Space>
size data_bytes(const AnyView<Rank, Space>& weight) {
  const size count = element_count(weight);
  switch (weight.type) {
    case ElementType::f32: return plan_product(4, count);
    case ElementType::bf16: return plan_product(2, count);
    case ElementType::mxfp4: return count / 2;
    default:
      throw invalid_argument("K3DeviceModel", "a weight", weight.type == ElementType::f64 ? "F64" : "absent",
                             "F32, BF16 or MXFP4");
  }
}
template <size Rank, MemorySpace Space>
size scale_bytes(const AnyView<Rank, Space>& weight) {
  return weight.type == ElementType::mxfp4 ? element_count(weight) / mxfp4_group : 0;
}
template <size Rank, MemorySpace Space>
size planned_bytes(const AnyView<Rank, Space>& weight) {
  return plan_sum(aligned_bytes(data_bytes(weight)), aligned_bytes(scale_bytes(weight)));
}
inline size planned_bytes(const ExpertWeights& expert) {
  return plan_sum(planned_bytes(expert.w1), plan_sum(planned_bytes(expert.w3), planned_bytes(expert.w2)));
}

/// Bytes of an expert itself.
inline size stored_bytes(const ExpertWeights& expert) {
  size bytes = 0;
  for (const AnyMatrix<>* matrix : {&expert.w1, &expert.w3, &expert.w2})
    bytes += data_bytes(*matrix) + scale_bytes(*matrix);
  return bytes;
}

/// The same in device memory; `data` and `scale` are where its elements lie.
inline AnyMatrix<MemorySpace::device> device_matrix(const AnyMatrix<>& matrix, const void* data, const void* scale) {
  AnyMatrix<MemorySpace::device> result;
  result.type = matrix.type;
  for (size d = 0; d < 2; ++d) result.extents[d] = matrix.extents[d];
  result.data = data;
  if (matrix.type == ElementType::mxfp4) result.scale = static_cast<const std::uint8_t*>(scale);
  return result;
}

/// Puts the copies of an expert's parts on a stream. `to` has planned_bytes of it, on a multiple of device_alignment.
/// Parts that are neighbours in host memory stay so, as one copy, where each then lies on a multiple of 16 bytes.
inline DeviceExpertWeights copy_expert(const ExpertWeights& expert, unsigned char* to, cudaStream_t stream) {
  struct Part {
    const unsigned char* from;
    size bytes, at;
  } part[6];
  const AnyMatrix<>* const matrix[3] = {&expert.w1, &expert.w3, &expert.w2};
  const Part* order[6];
  for (size i = 0; i < 3; ++i) {
    part[2 * i] = {static_cast<const unsigned char*>(matrix[i]->data), data_bytes(*matrix[i]), 0};
    part[2 * i + 1] = {matrix[i]->scale, scale_bytes(*matrix[i]), 0};
  }
  for (size i = 0; i < 6; ++i) order[i] = part + i;
  std::sort(order, order + 6, [](const Part* a, const Part* b) { return a->from < b->from; });
  const unsigned char* first = nullptr;  // what is copied next, [first, first + bytes) to `begin`
  size begin = 0, bytes = 0;
  const auto copy = [&] {
    if (bytes == 0) return;
    check_cuda("copy_expert", "cudaMemcpyAsync",
               cudaMemcpyAsync(to + begin, first, bytes, cudaMemcpyHostToDevice, stream));
  };
  for (const Part* p : order) {
    if (p->bytes == 0) continue;
    if (p->from != first + bytes || bytes % 16 != 0 || bytes == 0) {
      copy();
      begin = aligned_bytes(begin + bytes);
      first = p->from, bytes = 0;
    }
    part[p - part].at = begin + bytes;
    bytes += p->bytes;
  }
  copy();
  const auto placed = [&](size i) { return device_matrix(*matrix[i], to + part[2 * i].at, to + part[2 * i + 1].at); };
  return {placed(0), placed(1), placed(2)};
}

/// Brings experts from a source to the device, while the device computes. Copies follow each other on a stream of their
/// own, as experts arrive, and each is repacked behind its copy. A few are held at a time: fewer than one token
/// chooses, which a source has room for.
class ExpertTransfer {
 public:
  explicit ExpertTransfer(size top_k) : held_(larger(size{1}, smaller(size{4}, top_k - 1))) {}
  ExpertTransfer(const ExpertTransfer&) = delete;
  ExpertTransfer& operator=(const ExpertTransfer&) = delete;
  ~ExpertTransfer() { abandon(); }

  /// What is copied from here on waits for the event.
  void begin_after(const DeviceEvent& event) { event.make_wait(copies_); }

  /// Brings the experts `ids` to the places `place(i, weights of ids[i])`, and says where they lie in
  /// `arrived(i, weights)`. Throws what the source throws; nothing is on its way then, and what was brought is lost.
  template <class Place, class Arrived>
  void bring(const ExpertSource& source, const size* ids, size count, bool repack, Place&& place, Arrived&& arrived) {
    try {
      source.need(ids, count);
      for (size i = 0; i < count; ++i) {
        if (count_ == held_.size()) release_oldest();
        const ExpertWeights expert = source.acquire(ids[i]);
        Held& held = held_[(first_ + count_++) % held_.size()];
        held.source = &source, held.id = ids[i];
        const DeviceExpertWeights there = copy_expert(expert, place(i, expert), copies_);
        held.copied.record(copies_);
        if (repack) {
          held.copied.make_wait(repacks_);
          if (!repack_experts(gpu{repacks_}, &there, 1))
            throw invalid_argument("ExpertTransfer", "an expert", "stored otherwise", "as the others of its layer");
        }
        arrived(i, there);
      }
      arrived_.record(repack ? repacks_ : copies_);
    } catch (...) {
      abandon();
      throw;
    }
  }
  /// What `stream` is given from here on finds all that was brought.
  void make_wait(cudaStream_t stream) const { arrived_.make_wait(stream); }
  /// Waits until it is there.
  void finish() {
    while (count_ > 0) release_oldest();
    repacks_.finish();
  }

 private:
  struct Held {
    const ExpertSource* source = nullptr;
    size id = 0;
    DeviceEvent copied{DeviceEvent::Wait::sleeping};
  };

  void release(const Held& held) noexcept {
    held.source->release(held.id);
    first_ = (first_ + 1) % held_.size();
    --count_;
  }
  void release_oldest() {
    held_[first_].copied.wait();
    release(held_[first_]);
  }
  void abandon() noexcept {
    copies_.finish_quietly();
    repacks_.finish_quietly();
    while (count_ > 0) release(held_[first_]);
  }

  DeviceStream copies_, repacks_;
  DeviceEvent arrived_;
  std::vector<Held> held_;  // a ring
  size first_ = 0, count_ = 0;
};

}  // namespace k3::detail
