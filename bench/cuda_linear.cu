// SPDX-License-Identifier: Apache-2.0
// The dense products of a layer on the GPU at the released geometry, bf16: the launches of a layer as the decoder makes
// them, their sums, and single matrices. Weights are random and taken in turn from more memory than the L2 cache holds.
// What the last timed launch left in the last row is compared with sums in double.

#include <algorithm>
#include <string>
#include <vector>

#include <k3/cuda/linear.cuh>
#include <k3/cuda/mla_decode_token.cuh>
#include <k3/formula/activation.hpp>
#include <k3/geometry/presets.hpp>

#include "cuda_harness.cuh"

namespace {

using namespace k3;
using namespace k3::bench;

constexpr kimi_k3::Mla mla;
constexpr GluConfig glu{};
constexpr RandomWeight weights{1, 0.03f, 0}, stream_before{3, 1, 0};

/// Several matrices of one x in one launch: rows of each, and which are gated, give floats, or are added to the stream.
struct Part {
  size rows;
  bool gated = false, float_out = false, add = false;
};

class Bench {
 public:
  explicit Bench(Report& report) : report_(report) {
    fill_uniform(pool_.data(), pool_.count(), weights.seed, weights.range, 0, stream_);
    fill_uniform(scratch_.data(), scratch_.count(), 2, 1, 0, stream_);
    fill_uniform(means_.data(), means_.count(), 4, 1, 0, stream_);
    stream_.finish();
  }

  /// Some tenths of a second of work: the first tenth after a pause is slower by up to 10 %.
  void warm_up() {
    for (int i = 0; i < 600; ++i) launch({{163840, false, true}}, 7168, 1);
    stream_.finish();
  }

  /// One launch of products of rows 0 of the scratch memory, [batch, k].
  void products(const std::string& name, const std::vector<Part>& parts, size k, size batch,
                List list = List::products) {
    double bytes = 0;
    for (const Part& p : parts) bytes += 2.0 * static_cast<double>(p.rows * k) * (p.gated ? 2 : 1);
    const size n = parts[0].rows;
    time(
        name, batch, bytes, list, [&] { launch(parts, k, batch); },
        [&] {
          if (parts[0].add) fill_uniform(at(1), batch * n, stream_before.seed, 1, 0, stream_);
        });
    const std::vector<double> x = device_row(at(0) + (batch - 1) * k, k);
    const auto product = [&](size start, const std::vector<size>& channels) {
      return random_product(weights, places(channels, start, k), x);
    };
    auto place = used_.back().begin();
    for (size i = 0; i < parts.size(); ++i) {
      const Part& p = parts[i];
      const std::vector<size> channels = sampled(p.rows);
      const size row = (batch - 1) * p.rows;
      std::vector<double> want = product(*place++, channels);
      if (p.gated) {
        const std::vector<double> up = product(*place++, channels);
        for (size c = 0; c < want.size(); ++c)
          want[c] = situ_glu(rounded(want[c]), rounded(up[c]), double{glu.beta}, double{*glu.linear_beta});
      } else if (p.add) {
        for (size c = 0; c < want.size(); ++c) want[c] = stream_before(row + channels[c]);
        for (const auto& of_launch : used_) {
          const std::vector<double> part = product(of_launch[0], channels);
          for (size c = 0; c < want.size(); ++c) want[c] = rounded(want[c] + rounded(part[c]));
        }
      }
      if (p.float_out)
        report_.compare(name, device_row(at<float>(i + 1) + row, p.rows, channels), want, 3e-5);
      else
        report_.compare(name, device_row(at(i + 1) + row, p.rows, channels), want, 4e-3);
    }
  }

  /// The two halves of kv_b, before and behind attention; compared in the last head.
  void absorb(size batch) {
    const size head = mla.heads - 1, width = mla_cache_width(mla), latent = mla.kv_lora_rank;
    const auto out = device_view(at(1), batch, mla.heads, width);
    time("MLA absorb 96x(512x128)", batch, 2.0 * mla.heads * mla.qk_nope_head_dim * latent, List::products, [&] {
      mla_absorb_query(gpu{stream_}, mla, device_view(at(0), batch, mla_q_width(mla)), next(mla_kv_b_rows(mla), latent),
                       out);
    });
    const size start = used_.back()[0] + head * (mla.qk_nope_head_dim + mla.v_head_dim) * latent;
    const std::vector<double> x = device_row(
        at(0) + batch * mla_q_width(mla) - (mla.qk_nope_head_dim + mla.qk_rope_head_dim), mla.qk_nope_head_dim);
    const std::vector<size> channels = sampled(latent);
    report_.compare("MLA absorb", device_row(out.data + out.elements() - width, width, channels),
                    random_product(weights, places(channels, start, 1), x, latent), 4e-3);
  }
  void expand(size batch) {
    const size head = mla.heads - 1, latent = mla.kv_lora_rank, v = mla.v_head_dim;
    const auto means = device_view(static_cast<const float*>(means_.data()), batch, mla.heads, latent);
    time("MLA expand 96x(128x512)", batch, 2.0 * mla.heads * v * latent, List::products, [&] {
      mla_expand_values(gpu{stream_}, mla, means, next(mla_kv_b_rows(mla), latent),
                        device_view(at(1), batch, mla_v_width(mla)));
    });
    const size start = used_.back()[0] + (head * (mla.qk_nope_head_dim + v) + mla.qk_nope_head_dim) * latent;
    const std::vector<size> channels = sampled(v);
    report_.compare("MLA expand", device_row(at(1) + batch * mla_v_width(mla) - v, v, channels),
                    random_product(weights, places(channels, start, latent),
                                   device_row(means.data + means.elements() - latent, latent)),
                    4e-3);
  }

  /// What was timed since the last sum, under the name of a row of the results, if any.
  void sum(const char* name, size batch, List list = List::results) {
    if (name != nullptr) report_.add(name, batch, 0, sum_, bytes_, list);
    sum_ = {}, bytes_ = 0;
  }

 private:
  /// Activations or outputs, 16 MB apart, random numbers at first.
  template <class T = bf16>
  T* at(size which) {
    return reinterpret_cast<T*>(scratch_.data() + which * (size{8} << 20));
  }
  /// The next matrix of the pool, wrapping round at its end.
  AnyMatrix<MemorySpace::device> next(size rows, size columns) {
    const size count = (rows * columns + 127) / 128 * 128;
    if (next_ + count > pool_.count()) next_ = 0;
    used_.back().push_back(next_);
    next_ += count;
    return device_view(static_cast<const bf16*>(pool_.data() + next_ - count), rows, columns);
  }
  void launch(const std::vector<Part>& parts, size k, size batch) {
    const auto x = device_view(static_cast<const bf16*>(at(0)), batch, k);
    if (parts[0].add)
      return linear_add(gpu{stream_}, x, next(parts[0].rows, k), device_view(at(1), batch, parts[0].rows));
    std::vector<Projection> list;
    for (const Part& p : parts) {
      const size which = list.size() + 1;
      const auto w = next(p.rows, k);
      if (p.gated)
        list.push_back(gated_projection(glu, w, next(p.rows, k), device_view(at(which), batch, p.rows)));
      else if (p.float_out)
        list.push_back(projection(w, device_view(at<float>(which), batch, p.rows)));
      else
        list.push_back(projection(w, device_view(at(which), batch, p.rows)));
    }
    detail::run_projections(gpu{stream_}, "projections", x, list.data(), list.size());
  }
  /// One of the calls in a graph that rotates through at least 400 MB of weights, whose places stay in used_.
  template <class Work, class Before = NothingBefore>
  void time(const std::string& name, size batch, double bytes, List list, Work&& work, Before&& before = {}) {
    const size calls = std::max(size{4}, static_cast<size>(4e8 / bytes) + 1);
    used_.clear();
    const Timing t = measure(
        stream_, calls, report_.replays(21),
        [&] {
          for (size i = 0; i < calls; ++i) {
            used_.emplace_back();
            work();
          }
        },
        before);
    report_.add(name, batch, 0, t, bytes, list);
    sum_.median_us += t.median_us, sum_.low_us += t.low_us, sum_.high_us += t.high_us, bytes_ += bytes;
  }

  Report& report_;
  DeviceStream stream_;
  DeviceBuffer<bf16> pool_{size{3} << 30, false}, scratch_{size{128} << 20, false};
  DeviceBuffer<float> means_{128 * mla.heads * mla.kv_lora_rank, false};
  size next_ = 0;
  std::vector<std::vector<size>> used_{1};  // the weights' places of every launch
  Timing sum_{};
  double bytes_ = 0;
};

void run_batch(Bench& b, size batch) {
  const Part router{896, false, true};
  b.products("KDA q k v g f_a b 49376x7168", {{12288}, {12288}, {12288}, {12288}, {128}, {96}}, 7168, batch);
  b.products("KDA f_b 12288x128", {{12288}}, 128, batch);
  b.products("o_proj + residual 7168x12288", {{7168, false, false, true}}, 12288, batch);
  b.sum("dense_kda", batch);
  b.products("MLA q_a kv_a g 14400x7168", {{1536}, {576}, {12288}}, 7168, batch);
  b.products("MLA q_b 18432x1536", {{18432}}, 1536, batch);
  b.absorb(batch);
  b.expand(batch);
  b.products("o_proj + residual 7168x12288", {{7168, false, false, true}}, 12288, batch);
  b.sum("dense_mla", batch);
  b.products("MoE router down gate|up 16768x7168", {router, {3584}, {6144, true}}, 7168, batch);
  b.products("MoE shared down 7168x6144", {{7168}}, 6144, batch);
  b.products("MoE latent up + residual 7168x3584", {{7168, false, false, true}}, 3584, batch);
  b.sum("dense_moe", batch);
  b.products("MLP gate|up 67584x7168", {{33792, true}}, 7168, batch);
  b.products("MLP down + residual 7168x33792", {{7168, false, false, true}}, 33792, batch);
  b.sum("dense MLP", batch, List::none);
  b.products("lm_head", {{163840, false, true}}, 7168, batch, List::results);
  // Alone, for comparison with other libraries' tables.
  b.products("KDA q k v g 49152x7168", {{12288}, {12288}, {12288}, {12288}}, 7168, batch);
  b.products("MLA output gate 12288x7168", {{12288}}, 7168, batch);
  b.products("MLA q_a kv_a 2112x7168", {{1536}, {576}}, 7168, batch);
  b.products("MoE latent down 3584x7168", {{3584}}, 7168, batch);
  b.products("MoE shared gate|up 12288x7168", {{6144, true}}, 7168, batch);
  b.products("MoE router 896x7168", {router}, 7168, batch);
  b.sum(nullptr, batch);
}

}  // namespace

int main(int argc, char** argv) {
  return run_main([&] {
    Report report(argc, argv);
    Bench bench(report);
    bench.warm_up();
    for (const size batch : report.batches()) run_batch(bench, batch);
  });
}
