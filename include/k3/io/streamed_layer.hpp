// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/io/streamed_experts.hpp>

namespace k3::detail {

/// One layer's part of StreamedExperts.
class StreamedLayer final : public ExpertSource {
 public:
  StreamedLayer(std::shared_ptr<StreamedExperts> experts, k3::size first, k3::size count)
      : experts_(std::move(experts)), first_(first), count_(count) {}

  k3::size size() const override { return count_; }
  ExpertWeights operator[](k3::size expert) const override {
    const ExpertWeights weights = acquire(expert);
    release(expert);
    return weights;
  }
  void need(const k3::size* ids, k3::size count) const noexcept override { experts_->need(first_, ids, count); }
  ExpertWeights acquire(k3::size expert) const override { return experts_->acquire(first_ + expert); }
  void release(k3::size expert) const noexcept override { experts_->release(first_ + expert); }

 private:
  std::shared_ptr<StreamedExperts> experts_;
  k3::size first_, count_;
};

}  // namespace k3::detail
