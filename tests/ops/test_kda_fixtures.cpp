// SPDX-License-Identifier: Apache-2.0
// KDA on the host: values of the fixtures.

#include <algorithm>

#include <k3/geometry/presets.hpp>
#include <k3/ops/gated_rms_norm.hpp>
#include <k3/ops/kda_decode_token.hpp>
#include <k3/ops/kda_gate.hpp>
#include <k3/ops/rms_norm.hpp>

#include "support/kda_oracle.hpp"
#include "support/ops_fixture.hpp"

using namespace k3;
using namespace k3::test;

TEMPLATE_TEST_CASE("rms_norm and the L2 factor reproduce the fixtures", "[kda][fixture]", float, double) {
  for (const OpsCase& c : ops_cases("rmsnorm")) {
    INFO(c.name);
    const OpsTensor given = c.tensor("x");
    const auto x = converted<TestType>(given.values), weight = converted<TestType>(c.tensor("weight").values);
    std::vector<TestType> y(x.size());
    rms_norm(host{}, view(x, given.shape[0], given.shape[1]), view(weight),
             static_cast<TestType>(c.params.at("eps").get<double>()), view(y, given.shape[0], given.shape[1]));
    check(compare(y, c.tensor("y").values, c.rtol, c.atol));
  }
  for (const OpsCase& c : ops_cases("l2norm")) {
    const OpsTensor given = c.tensor("x");
    auto x = converted<TestType>(given.values);
    const size n = given.shape[1];
    for (size row = 0; row < given.shape[0]; ++row) {
      TestType* at = x.data() + row * n;
      using Plain = k3::detail::KdaPlain<TestType>;
      Plain::scale(at, l2_scale(Plain::squares(at, n), static_cast<TestType>(KDA_L2_EPS)), n);
    }
    check(compare(x, c.tensor("y").values, c.rtol, c.atol));
  }
}

TEMPLATE_TEST_CASE("gated_rms_norm reproduces the fixture", "[kda][fixture]", float, double) {
  for (const OpsCase& c : ops_cases("gated_rmsnorm")) {
    const OpsTensor given = c.tensor("x");
    const size rows = given.shape[0];
    const KdaConfig g{given.shape[1], given.shape[2]};
    const auto x = converted<TestType>(given.values), gate = converted<TestType>(c.tensor("gate").values);
    const auto weight = converted<float>(c.tensor("weight").values);
    const auto eps = static_cast<TestType>(c.params.at("eps").get<double>());
    std::vector<TestType> y(x.size());
    gated_rms_norm(host{}, g, view(x, rows, kda_width(g)), view(gate, rows, kda_width(g)), AnyVector<>(view(weight)),
                   eps, view(y, rows, kda_width(g)));
    check(compare(y, c.tensor("y").values, c.rtol, c.atol));
    auto in_place = x;
    gated_rms_norm(host{}, g, view(in_place, rows, kda_width(g)), view(gate, rows, kda_width(g)), view(weight), eps,
                   view(in_place, rows, kda_width(g)));
    check(same_bits(in_place, y));
  }
}

TEMPLATE_TEST_CASE("short_conv reproduces the fixture, at once and token by token", "[kda][fixture]", float, double) {
  const Isa isa = GENERATE(from_range(available_isas()));
  for (const OpsCase& c : ops_cases("short_conv")) {
    INFO(c.name);
    const OpsTensor given = c.tensor("x");
    const size rows = given.shape[0], channels = given.shape[1], taps = c.params.at("kernel").get<size>();
    const auto x = converted<TestType>(given.values), weight = converted<TestType>(c.tensor("weight").values);
    auto window = converted<TestType>(c.tensor("state").values), stepped = window;
    const std::vector<id> slots(rows, 0);
    std::vector<TestType> y(x.size()), one(x.size());
    const host exec{.isa = isa};
    short_conv(exec, view(x, rows, channels), view(weight, channels, taps), view(slots),
               view(window.data(), 1, channels, taps - 1), view(y, rows, channels));
    check(compare(y, c.tensor("y").values, c.rtol, c.atol));
    check(compare(window, c.tensor("state_out").values, 0));
    for (size row = 0; row < rows; ++row)
      short_conv(exec, view(x.data() + row * channels, 1, channels), AnyMatrix<>(view(weight, channels, taps)),
                 view(slots.data(), 1), view(stepped.data(), 1, channels, taps - 1),
                 view(one.data() + row * channels, 1, channels));
    check(same_bits(one, y));
    check(same_bits(stepped, window));
  }
}

TEMPLATE_TEST_CASE("kda_gate reproduces the fixtures", "[kda][fixture]", float, double) {
  for (const OpsCase& c : ops_cases("kda_gate")) {
    INFO(c.name);
    const OpsTensor given = c.tensor("z");
    const KdaConfig g{given.shape[0], given.shape[1]};
    const auto z = converted<TestType>(given.values);
    const auto a_log = converted<float>(c.tensor("A_log").values), bias = converted<float>(c.tensor("dt_bias").values);
    std::optional<float> bound;
    if (!c.params.at("lower_bound").is_null()) bound = c.params.at("lower_bound").get<float>();
    std::vector<TestType> log_decay(z.size());
    kda_gate(host{}, g, view(z, 1, kda_width(g)), view(a_log), AnyVector<>(view(bias)), bound,
             view(log_decay, 1, kda_width(g)));
    check(compare(log_decay, c.tensor("log_decay").values, c.rtol, c.atol));
    for (TestType& v : log_decay) v = std::exp(v);
    check(compare(log_decay, c.tensor("decay").values, c.rtol, c.atol));
  }
}

namespace {

template <class Kernel>
void check_recurrence(const OpsCase& c) {
  using Acc = typename Kernel::Acc;
  const size tokens = c.params.at("tokens").get<size>(), heads = c.params.at("heads").get<size>(),
             n = c.params.at("head_dim").get<size>();
  const auto q = c.tensor("q_raw").values, k = c.tensor("k_raw").values, v = c.tensor("v").values;
  const auto log_decay = converted<Acc>(c.tensor("log_decay").values),
             beta = converted<Acc>(c.tensor("beta_logit").values);
  auto state = converted<Acc>(c.tensor("state_in").values);
  std::vector<Acc> out(q.size());
  k3::detail::KdaScratch<Acc, 128> s;
  for (size t = 0; t < tokens; ++t)
    for (size h = 0; h < heads; ++h) {
      const size at = (t * heads + h) * n;
      for (size d = 0; d < n; ++d) {
        s.query[d] = static_cast<Acc>(q[at + d]);
        s.key[d] = static_cast<Acc>(k[at + d]);
        s.value[d] = static_cast<Acc>(v[at + d]);
      }
      Acc* own = state.data() + h * n * n;
      k3::detail::kda_recurrence<Kernel>(s, n, log_decay.data() + at, beta[t * heads + h], own, own);
      std::copy(s.out, s.out + n, out.data() + at);
    }
  check(compare(out, c.tensor("o").values, c.rtol, c.atol));
  check(compare(state, c.tensor("state_out").values, c.rtol, c.atol));
}

}  // namespace

TEST_CASE("the recurrence reproduces the fixtures in every version", "[kda][fixture]") {
  for (const OpsCase& c : ops_cases("kda_recurrent_step")) {
    INFO(c.name);
    check_recurrence<k3::detail::KdaPlain<double>>(c);
    check_recurrence<k3::detail::KdaPlain<float>>(c);
#if K3_X86_64
    if (best_isa() >= Isa::avx2) check_recurrence<k3::detail::KdaAvx2>(c);
    if (best_isa() >= Isa::avx512) check_recurrence<k3::detail::KdaAvx512>(c);
#endif
  }
}
