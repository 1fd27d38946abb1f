// SPDX-License-Identifier: Apache-2.0
#include <k3/formula/activation.hpp>
#include <k3/ops/situ_glu.hpp>

#include "support/compare.hpp"
#include "support/ops_fixture.hpp"

using namespace k3;
using namespace k3::test;

namespace {

double naive_sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double naive_situ(double g, double u, double b1, double b2) {
  return b1 * std::tanh(g / b1) * naive_sigmoid(g) * b2 * std::tanh(u / b2);
}

template <class Real>
std::vector<Real> capped(const std::vector<Real>& x, Real cap) {
  std::vector<Real> y;
  for (const Real value : x) y.push_back(softcap(value, cap));
  return y;
}

}  // namespace

TEMPLATE_TEST_CASE("activations: softcap gives the fixture's values", "[activation]", float, double) {
  for (const OpsCase& c : ops_cases("softcap")) {
    INFO(c.name);
    const auto y = capped(converted<TestType>(c.tensor("x").values), c.params["cap"].template get<TestType>());
    check(compare(y, c.tensor("y").values, c.rtol, c.atol));
  }
}

TEMPLATE_TEST_CASE("activations: situ_glu_vec gives the fixture's values", "[activation]", float, double) {
  for (const OpsCase& c : ops_cases("situ_glu")) {
    INFO(c.name);
    GluConfig config;
    config.beta = c.params["beta"].get<float>();
    config.linear_beta.reset();
    if (!c.params["linear_beta"].is_null()) config.linear_beta = c.params["linear_beta"].get<float>();
    const auto gate = converted<TestType>(c.tensor("gate").values), up = converted<TestType>(c.tensor("up").values);
    const auto shape = c.tensor("gate").shape;
    std::vector<TestType> y(gate.size());
    situ_glu_vec(host{}, config, view(gate, shape[0], shape[1]), view(up, shape[0], shape[1]),
                 view(y, shape[0], shape[1]));
    check(compare(y, c.tensor("y").values, c.rtol, c.atol));
  }
}

TEMPLATE_TEST_CASE("activations: softcap keeps tiny values and saturates (cases 40, 41)", "[activation]", float,
                   double) {
  for (const TestType cap : {TestType(30), TestType(25)}) {
    check(
        compare(capped<TestType>({TestType(1e-37), TestType(-1e-37)}, cap), std::vector<double>{1e-37, -1e-37}, 1e-3));
    CHECK(softcap(TestType(2000), cap) == cap);
    CHECK(softcap(TestType(-2000), cap) == -cap);
    CHECK(softcap(std::numeric_limits<TestType>::infinity(), cap) == cap);
    CHECK(std::isnan(softcap(std::numeric_limits<TestType>::quiet_NaN(), cap)));
    CHECK(softcap(TestType(0), cap) == TestType(0));
  }
}

TEMPLATE_TEST_CASE("activations: SiTU-GLU at known points (case 42)", "[activation]", float, double) {
  const std::vector<double> gate{3, 3, 1000, 4, -2, 1.5, 1, 1}, up{50, 1, 1000, 25, 3, -8, 1, 2};
  const std::vector<double> want{58.3262193, 2.4188159, 100, 56.95932, -0.657874, -9.068053, 0.715818, 1.429351};
  std::vector<TestType> got;
  for (std::size_t i = 0; i < gate.size(); ++i)
    got.push_back(situ_glu(TestType(gate[i]), TestType(up[i]), TestType(4), TestType(25)));
  check(compare(got, want, 1e-6));
  for (const double u : {-1e4, -1.0, 0.0, 3.0, 1e4}) {
    CHECK(situ_glu(TestType(0), TestType(u), TestType(4), TestType(25)) == TestType(0));
    for (const double g : {-1e4, -20.0, -1.0, 1.0, 7.0, 1e4})
      CHECK(std::abs(situ_glu(TestType(g), TestType(u), TestType(4), TestType(25))) <= TestType(100));
  }
  // The planted fault: SwiGLU in its place.
  CHECK(std::abs(silu(TestType(4)) * TestType(25) - situ_glu(TestType(4), TestType(25), TestType(4), TestType(25))) >
        1);
}

TEMPLATE_TEST_CASE("activations: sigmoid, silu and softplus have their limits", "[activation]", float, double) {
  const TestType inf = std::numeric_limits<TestType>::infinity();
  CHECK(sigmoid(TestType(0)) == TestType(0.5));
  CHECK(sigmoid(inf) == TestType(1));
  CHECK(sigmoid(-inf) == TestType(0));
  CHECK(silu(-inf) == TestType(0));
  CHECK(silu(inf) == inf);
  CHECK(softplus(-inf) == TestType(0));
  CHECK(softplus(TestType(1000)) == TestType(1000));
  check(compare(std::vector<TestType>{softplus(TestType(0)), silu(TestType(1.2784645))},
                std::vector<double>{std::log(2.0), 1}, 1e-6));
  for (const auto f : {sigmoid<TestType>, silu<TestType>, softplus<TestType>})
    CHECK(std::isnan(f(std::numeric_limits<TestType>::quiet_NaN())));
}

TEST_CASE("activations: float against double, within the stated bound", "[activation]") {
  const auto gate = random_normal(4096, 1, 6.0), up = random_normal(4096, 2, 30.0);
  const auto gate_f = converted<float>(gate), up_f = converted<float>(up);
  std::vector<double> want(gate.size());
  for (std::size_t i = 0; i < want.size(); ++i)
    want[i] = naive_situ(static_cast<double>(gate_f[i]), static_cast<double>(up_f[i]), 4, 25);
  std::vector<float> got(gate.size());
  situ_glu_vec(host{}, GluConfig{}, view(gate_f, 64, 64), view(up_f, 64, 64), view(got, 64, 64));
  check(compare(got, want, 1e-6));
}

TEST_CASE("activations: situ_glu_vec rounds once to bf16, in place, for any number of threads", "[activation]") {
  const auto gate = converted<bf16>(random_normal(96 * 64, 3, 3.0)),
             up = converted<bf16>(random_normal(96 * 64, 4, 9.0));
  std::vector<bf16> want(gate.size());
  for (std::size_t i = 0; i < want.size(); ++i)
    want[i] = bf16(situ_glu(static_cast<float>(gate[i]), static_cast<float>(up[i]), 4.0f, 25.0f));
  for (const int threads : {1, 2, 3}) {
    auto out = gate;
    situ_glu_vec(host{.threads = threads}, GluConfig{}, view(out, 96, 64), view(up, 96, 64), view(out, 96, 64));
    check(same_bits(out, want));
  }
}

TEST_CASE("activations: situ_glu_vec names what does not fit and changes nothing", "[activation]") {
  const std::vector<float> gate(6, 1.0f), up(4, 1.0f);
  std::vector<float> out(6, 7.0f);
  const auto message = [&](const GluConfig& config, auto up_view) {
    try {
      situ_glu_vec(host{}, config, view(gate, 2, 3), up_view, view(out, 2, 3));
    } catch (const invalid_argument& e) {
      return e.operation() + "/" + e.argument();
    }
    return std::string("nothing thrown");
  };
  CHECK(message({}, view(up, 2, 2)) == "situ_glu_vec/up");
  CHECK(message({GluConfig::Kind::situ, 0.0f, 25.0f}, view(gate, 2, 3)) == "situ_glu_vec/beta");
  CHECK(message({GluConfig::Kind::situ, 4.0f, 0.0f}, view(gate, 2, 3)) == "situ_glu_vec/linear_beta");
  CHECK(message({GluConfig::Kind::situ, std::numeric_limits<float>::infinity(), 25.0f}, view(gate, 2, 3)) ==
        "situ_glu_vec/beta");
  CHECK(out == std::vector<float>(6, 7.0f));
}
