// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <set>

#include <k3/ops/mix_routed_experts.hpp>
#include <k3/ops/row_status.hpp>

#include "cuda/device_test.hpp"
#include "cuda/moe_device.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/differences.hpp"

// Problems for the router and the routed experts, and their answers: the router's in double, the experts' by the host.
namespace k3::test {

inline constexpr unsigned nan_router = static_cast<unsigned>(RowStatus::nan_router_logits);
inline constexpr unsigned bad_expert = static_cast<unsigned>(RowStatus::bad_expert);
inline const float nan_value = std::numeric_limits<float>::quiet_NaN();
inline const float infinity = std::numeric_limits<float>::infinity();

inline RouterInputs router(std::vector<float> logits, std::vector<float> bias, size k, bool renormalize = true,
                           float scale = 1) {
  const size experts = bias.size(), rows = logits.size() / experts;
  return {rows, experts, k, renormalize, scale, std::move(logits), std::move(bias), {}};
}

inline void check_routing(const RouterOutputs& got, const std::vector<id>& ids, const std::vector<float>& weights) {
  CHECK(got.ids == ids);
  check(compare(got.weights, weights, 1e-5));
  CHECK(got.status == std::vector<unsigned>(got.status.size()));
}

/// The routing in double, by sorting.
struct Routed {
  std::vector<id> ids;
  std::vector<double> weights, scores;
};
inline Routed route_in_double(const RouterInputs& in, size row) {
  std::vector<double> p(in.experts), score(in.experts);
  std::vector<id> order(in.experts);
  for (size e = 0; e < in.experts; ++e) {
    p[e] = 1 / (1 + std::exp(-static_cast<double>(in.logits[row * in.experts + e])));
    score[e] = p[e] + static_cast<double>(in.bias[e]);
    order[e] = static_cast<id>(e);
  }
  const auto at = [](const std::vector<double>& values, id e) { return values[static_cast<size>(e)]; };
  std::stable_sort(order.begin(), order.end(), [&](id a, id b) { return at(score, a) > at(score, b); });
  order.resize(in.k);
  Routed result{order, {}, score};
  double sum = 0;
  for (id e : order) sum += at(p, e);
  const bool divide = in.renormalize && in.k > 1;
  for (id e : order)
    result.weights.push_back((divide ? at(p, e) / (sum + 1e-20) : at(p, e)) * static_cast<double>(in.scale));
  return result;
}

/// Ids of one router row must be those of double but where scores are so close that float may order them otherwise.
inline void check_against_double(const RouterInputs& in, const RouterOutputs& got) {
  std::vector<float> got_weights;
  std::vector<double> want_weights;
  for (size row = 0; row < in.rows; ++row) {
    const Routed want = route_in_double(in, row);
    const std::vector<id> ids(got.ids.begin() + static_cast<long>(row * in.k),
                              got.ids.begin() + static_cast<long>((row + 1) * in.k));
    REQUIRE(std::set<id>(ids.begin(), ids.end()).size() == in.k);
    REQUIRE(*std::min_element(ids.begin(), ids.end()) >= 0);
    REQUIRE(static_cast<size>(*std::max_element(ids.begin(), ids.end())) < in.experts);
    for (size j = 0; j < in.k; ++j) {
      const double mine = want.scores[static_cast<size>(ids[j])], theirs = want.scores[static_cast<size>(want.ids[j])];
      INFO("row " << row << " rank " << j << ": expert " << ids[j] << " of score " << mine << ", in double "
                  << want.ids[j] << " of " << theirs);
      CHECK(std::abs(mine - theirs) <= 3e-7 * (1 + std::abs(theirs)));
      if (ids == want.ids) {
        got_weights.push_back(got.weights[row * in.k + j]);
        want_weights.push_back(want.weights[j]);
      }
    }
  }
  check(compare(got_weights, want_weights, 2e-6));
}

inline unsigned random_bits(std::uint64_t& state) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return static_cast<unsigned>(state >> 20);
}

/// Weights of about 1 / sqrt(columns): MXFP4 with scale bytes over a range of 2^4, or plain elements.
inline std::vector<ExpertBytes> random_experts(const LatentMoeConfig& g, ElementType type, std::uint64_t seed) {
  std::vector<ExpertBytes> experts(g.n_routed);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  const size width = moe_expert_width(g), count = g.expert_hidden * width;
  for (ExpertBytes& expert : experts)
    for (size m = 0; m < 3; ++m) {
      const double columns = static_cast<double>(m == 2 ? g.expert_hidden : width);
      if (type == ElementType::mxfp4) {
        const unsigned scale = static_cast<unsigned>(127 - std::lround(std::log2(columns) / 2) - 3);
        expert.data[m].resize(count / 2);
        expert.scale[m].resize(count / 32);
        for (auto& byte : expert.data[m]) byte = static_cast<unsigned char>(random_bits(state));
        for (auto& byte : expert.scale[m]) byte = static_cast<unsigned char>(scale + random_bits(state) % 5);
        continue;
      }
      expert.data[m].resize(count * (type == ElementType::bf16 ? 2 : 4));
      for (size i = 0; i < count; ++i) {
        const float value = static_cast<float>((random_bits(state) % 20001 / 1e4 - 1) * 1.7 / std::sqrt(columns));
        const bf16 rounded(value);
        if (type == ElementType::bf16)
          __builtin_memcpy(&expert.data[m][i * 2], &rounded, 2);
        else
          __builtin_memcpy(&expert.data[m][i * 4], &value, 4);
      }
    }
  return experts;
}

template <class X>
MoeInputs<X> random_problem(LatentMoeConfig g, ElementType type, size rows, std::uint32_t seed) {
  MoeInputs<X> in;
  in.g = g, in.rows = rows, in.type = type;
  in.experts = random_experts(g, type, seed);
  in.latent = converted<X>(random_normal(rows * moe_expert_width(g), seed));
  std::uint64_t state = seed + 99;
  for (size row = 0; row < rows; ++row) {
    std::set<k3::id> chosen;
    while (chosen.size() < g.top_k) {
      const k3::id e = static_cast<k3::id>(random_bits(state) % g.n_routed);
      if (!chosen.insert(e).second) continue;
      in.ids.push_back(e);
      in.weights.push_back(0.1f + static_cast<float>(random_bits(state) % 1000) / 1000.0f);
    }
  }
  return in;
}

/// The host operation in precision P.
template <class P, class X>
std::vector<typename P::activation> on_host(const MoeInputs<X>& in) {
  using T = typename P::activation;
  const size width = moe_expert_width(in.g);
  std::vector<k3::ExpertWeights> experts(in.g.n_routed);
  for (size e = 0; e < experts.size(); ++e) {
    k3::AnyMatrix<>* matrices[3] = {&experts[e].w1, &experts[e].w3, &experts[e].w2};
    for (size m = 0; m < 3; ++m) {
      matrices[m]->data = in.experts[e].data[m].data(), matrices[m]->scale = in.experts[e].scale[m].data();
      matrices[m]->type = in.type;
      matrices[m]->extents[0] = m == 2 ? width : in.g.expert_hidden;
      matrices[m]->extents[1] = m == 2 ? in.g.expert_hidden : width;
    }
  }
  const auto latent = converted<T>(in.latent);
  const auto weights = converted<typename P::accumulator>(in.weights);
  std::vector<T> out(in.rows * width);
  k3::MoeWorkspace<P> workspace(in.g, in.rows);
  mix_routed_experts(
      k3::host{}, in.g, k3::view(latent.data(), in.rows, width), k3::view(in.ids.data(), in.rows, size{in.g.top_k}),
      k3::view(weights.data(), in.rows, size{in.g.top_k}), experts, workspace, k3::view(out.data(), in.rows, width));
  return out;
}

template <class X>
MoeInputs<X> rows_of(const MoeInputs<X>& in, size first, size count) {
  MoeInputs<X> part = in;
  const auto take = [&](auto& values, size columns) {
    values.assign(values.begin() + static_cast<long>(first * columns),
                  values.begin() + static_cast<long>((first + count) * columns));
  };
  part.rows = count;
  take(part.latent, moe_expert_width(in.g));
  take(part.ids, in.g.top_k);
  take(part.weights, in.g.top_k);
  return part;
}

template <class X>
std::vector<X> row_of(const std::vector<X>& values, size row, size width) {
  return {values.begin() + static_cast<long>(row * width), values.begin() + static_cast<long>((row + 1) * width)};
}

inline LatentMoeConfig geometry(size width, size expert_hidden, size experts, size k) {
  return {width, 0, expert_hidden, experts, k, 0, {}, false, true, 1.0f};
}

inline size total(const std::vector<size>& counts) {
  size sum = 0;
  for (size c : counts) sum += c;
  return sum;
}

}  // namespace k3::test
