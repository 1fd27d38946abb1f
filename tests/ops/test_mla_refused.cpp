// SPDX-License-Identifier: Apache-2.0
// MLA: what is refused, by name, with nothing changed.
#include <limits>

#include <k3/ops/gated_mla_attend.hpp>

#include "ops/mla_problem.hpp"

namespace {

using namespace k3;
using namespace k3::test;

/// f() must throw an invalid_argument whose text holds all of `parts`.
template <class F>
void check_refused(F&& f, std::initializer_list<const char*> parts) {
  std::string text = "nothing thrown";
  try {
    f();
  } catch (const invalid_argument& e) {
    text = e.what();
  }
  for (const char* part : parts) {
    INFO("text: " << text << "; must hold: " << part);
    CHECK(text.find(part) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("MLA refuses what its arguments show to be wrong and changes nothing", "[mla]") {
  const MlaConfig g = mla_geometry_of(2, 8, 4, 6, 10);
  const MlaInputs<Fp32> in(MlaProblem(g, 5, 9));
  const size q_width = 24, a_width = 14, v_width = 12;
  MlaKv<float> kv(g, 2, 16, 4);
  const MlaKv<float> before = kv;
  std::vector<float> out(3 * v_width, 7.0f);
  const std::vector<float> untouched = out;
  MlaWorkspace<float> workspace(g, 3);

  struct Call {
    MlaConfig g;
    View<const float, 2> q, kv_a;
    View<const float, 1> norm;
    AnyMatrix<> kv_b;
    View<const float, 2> gate;
    std::vector<id> slots{0, 0, 1}, positions{0, 1, 0};
    MlaKvView<float> kv;
    MlaWorkspace<float>* workspace;
    View<float, 2> out;
  };
  const Call good{g,
                  view(in.q.data(), 3, q_width),
                  view(in.kv_a.data(), 3, a_width),
                  view(in.norm),
                  AnyMatrix<>(view(in.kv_b, 28, 10)),
                  view(in.gate.data(), 3, v_width),
                  {0, 0, 1},
                  {0, 1, 0},
                  kv.view(),
                  &workspace,
                  view(out, 3, v_width)};
  const auto refused = [&](auto&& change, std::initializer_list<const char*> parts) {
    Call call = good;
    change(call);
    check_refused(
        [&] {
          mla_decode_token(host{1}, call.g, call.q, call.kv_a, call.norm, call.kv_b, call.gate, view(call.slots),
                           view(call.positions), call.kv, *call.workspace, call.out);
        },
        parts);
    CHECK(std::memcmp(before.row(0, 0), static_cast<const MlaKv<float>&>(kv).row(0, 0), kv.bytes()) == 0);
    check(same_bits(out, untouched));
  };
  refused([](Call& c) { c.q.extents[1] = 23; }, {"mla_decode_token: q is [3, 23], expected [3, 24]"});
  refused([](Call& c) { c.q.extents[0] = 2; }, {"q is [2, 24]"});
  refused([](Call& c) { c.kv_a.extents[1] = 13; }, {"kv_a is [3, 13], expected [3, 14]"});
  refused([](Call& c) { c.norm.extents[0] = 9; }, {"kv_a_layernorm is [9], expected [10]"});
  refused([](Call& c) { c.kv_b.extents[0] = 27; }, {"kv_b is [27, 10], expected [28, 10]"});
  refused([](Call& c) { c.kv_b = {}; }, {"kv_b is absent"});
  refused([](Call& c) { c.kv_b.type = ElementType::mxfp4; }, {"kv_b is MXFP4"});
  refused([](Call& c) { c.gate.extents[1] = 11; }, {"gate is [3, 11]"});
  refused([](Call& c) { c.gate = {}; }, {"gate is absent, expected a gate"});
  refused([](Call& c) { c.g.mla_use_output_gate = false; }, {"gate is given", "mla_use_output_gate is false"});
  refused([](Call& c) { c.g.mla_use_nope = false; }, {"geometry.mla_use_nope is false"});
  refused([](Call& c) { c.g.heads = 0; }, {"geometry.heads is 0"});
  refused([](Call& c) { c.g.norm_eps = -1; }, {"norm_eps"});
  refused([](Call& c) { c.out.extents[1] = 11; }, {"out is [3, 11]"});
  refused([](Call& c) { c.positions.pop_back(); }, {"positions is [2], expected [3]"});
  refused([](Call& c) { c.slots[2] = 2; }, {"slots[2] is 2, expected pad_slot or below 2"});
  refused([](Call& c) { c.slots[0] = -2; }, {"slots[0] is -2"});
  refused([](Call& c) { c.positions[2] = 16; }, {"positions[2] is 16", "capacity of 16 positions (cache full)"});
  refused([](Call& c) { c.positions[2] = -1; }, {"positions[2] is -1"});
  refused([](Call& c) { c.positions[1] = 2; }, {"positions[1] is 2, expected one more than 0"});
  refused([](Call& c) { c.positions[1] = 0; }, {"positions[1] is 0"});
  refused(
      [](Call& c) {
        c.slots = {0, 1, 0};
        c.positions = {3, 0, 3};
      },
      {"positions[2] is 3, expected one more than 3"});
  refused([](Call& c) { c.kv.pages.extents[2] = 13; }, {"kv.pages is [8, 4, 13], expected [8, 4, 14]"});
  refused([](Call& c) { c.kv.page_size = 0; }, {"kv.page_size is 0"});
  refused([](Call& c) { c.kv.pages.extents[0] = 4; }, {"block_table of row [2] is 4, expected a page below 4"});
  const std::vector<id> negative{0, 1, -1, 3, 4, 5, 6, 7};
  refused(
      [&](Call& c) {
        c.kv.block_table = view(negative.data(), 2, 4);
        c.positions = {12, 13, 0};
      },
      {"is -1"});
  MlaWorkspace<float> small(g, 2), other(mla_geometry_of(2, 8, 4, 6, 11), 3);
  refused([&](Call& c) { c.workspace = &small; }, {"workspace's max_rows is 2, expected 3"});
  refused([&](Call& c) { c.workspace = &other; }, {"workspace's width is 15, expected 14"});
  refused(
      [&](Call& c) {
        c.q = view(static_cast<const float*>(out.data()), 1, q_width);
        c.slots = {0};
        c.positions = {0};
        c.kv_a.extents[0] = c.gate.extents[0] = c.out.extents[0] = 1;
      },
      {"out is overlapping q"});
  refused([&](Call& c) { c.kv_a = view(static_cast<const float*>(kv.row(0, 0)), 3, a_width); },
          {"kv.pages is overlapping kv_a"});
  refused([&](Call& c) { c.out = view(kv.row(0, 0), 3, v_width); }, {"out is overlapping kv.pages"});
  refused([&](Call& c) { c.gate = view(static_cast<const float*>(out.data()) + 1, 3, v_width); },
          {"out is overlapping gate"});
  refused([&](Call& c) { c.gate = view(static_cast<const float*>(out.data()), 3, v_width); },
          {"out is overlapping gate"});
}

TEST_CASE("the parts of MLA name themselves and what is wrong", "[mla]") {
  const MlaConfig g = mla_geometry_of(2, 8, 4, 6, 10);
  MlaKv<float> kv(g, 1, 4);
  std::vector<float> big(1000);
  const std::vector<id> slots{0}, positions{0}, late{4};
  MlaConfig rope = g, odd = g;
  rope.mla_use_nope = odd.mla_use_nope = false;
  odd.qk_rope_head_dim = 3;
  const auto f = [&](auto... n) { return view(big.data(), static_cast<size>(n)...); };
  const auto append = [&](const MlaConfig& c, const std::vector<id>& p, float eps) {
    mla_append(host{1}, c, f(1, 14), f(10), eps, view(slots), view(p), kv.view());
  };
  check_refused([&] { append(g, late, 1e-6f); }, {"mla_append", "capacity of 4", "cache full"});
  check_refused([&] { append(g, positions, -1.0f); }, {"mla_append", "norm_eps"});
  check_refused([&] { append(rope, positions, 1e-6f); }, {"mla_append", "mla_use_nope"});
  for (const View<const float, 1>& norm : {View<const float, 1>{big.data(), {10}, {2}}, {nullptr, {10}, {1}}})
    check_refused([&] { mla_append(host{1}, g, f(1, 14), norm, 1e-6f, view(slots), view(positions), kv.view()); },
                  {"mla_append: kv_a_layernorm is"});
  const auto attend = [&](const MlaConfig& c, auto q, auto o, const std::vector<id>& p) {
    mla_attend(host{1}, c, q, kv.view(), view(slots), view(p), o);
  };
  const auto o = view(big.data() + 100, 1, 2, 10);
  check_refused([&] { attend(g, f(1, 2, 13), o, positions); },
                {"mla_attend: q_latent is [1, 2, 13], expected [1, 2, 14]"});
  check_refused([&] { attend(g, f(1, 2, 14), f(1, 2, 9), positions); }, {"o_latent is [1, 2, 9]"});
  check_refused([&] { attend(g, f(1, 2, 14), f(1, 2, 10), positions); }, {"o_latent is overlapping q_latent"});
  check_refused([&] { attend(g, f(1, 2, 14), view(kv.row(0, 0), 1, 2, 10), positions); }, {"overlapping kv.pages"});
  check_refused([&] { attend(g, f(1, 2, 14), o, late); }, {"mla_attend: positions[0] is 4"});
  check_refused([&] { attend(rope, f(1, 2, 14), o, positions); }, {"mla_attend", "mla_use_nope"});
  const auto absorb = [&](const MlaConfig& c, auto q, auto w, auto to) { mla_absorb_query(host{1}, c, q, w, to); };
  const auto w = view(big.data() + 200, 28, 10);
  const auto to = view(big.data() + 500, 1, 2, 14);
  check_refused([&] { absorb(g, f(1, 23), w, to); }, {"mla_absorb_query: q is [1, 23], expected [1, 24]"});
  check_refused([&] { absorb(g, f(1, 24), f(28, 9), to); }, {"mla_absorb_query: kv_b is [28, 9]"});
  check_refused([&] { absorb(g, f(1, 24), w, f(1, 2, 14)); }, {"q_latent is overlapping q"});
  check_refused([&] { absorb(g, f(1, 24), w, view(big.data() + 470, 1, 2, 14)); }, {"q_latent is overlapping kv_b"});
  check_refused([&] { absorb(rope, f(1, 24), w, to); }, {"mla_absorb_query", "mla_use_nope"});
  const auto expand = [&](auto from, auto weight, auto result) { mla_expand_values(host{1}, g, from, weight, result); };
  const auto v = view(big.data() + 500, 1, 12);
  check_refused([&] { expand(f(1, 2, 9), w, v); }, {"mla_expand_values: o_latent is [1, 2, 9]"});
  check_refused([&] { expand(f(1, 2, 10), w, f(1, 12)); }, {"out is overlapping o_latent"});
  check_refused([&] { expand(f(1, 2, 10), w, view(big.data() + 470, 1, 12)); }, {"out is overlapping kv_b"});
  check_refused([&] { expand(f(1, 2, 10), w, view(big.data() + 500, 1, 11)); }, {"out is [1, 11]"});
  check_refused([&] { mla_output_gate(host{1}, f(1, 12), v, view(big.data() + 4, 1, 12)); }, {"out is overlapping x"});
  check_refused([&] { mla_output_gate(host{1}, f(1, 12), f(1, 11), v); }, {"mla_output_gate: gate is [1, 11]"});
  check_refused([&] { MlaKv<float>(g, 0, 4); }, {"slots is 0"});
  check_refused([&] { MlaKv<float>(g, 1, 0); }, {"capacity is 0"});
  check_refused([&] { kv.set_length(0, 5); }, {"length is 5"});
  check_refused([&] { kv.set_length(1, 0); }, {"slot is 1"});
  check_refused([&] { kv.row(0, 4); }, {"position is 4"});

  MlaExpandedKv<float> expanded(g, 1);
  const auto token = [&](const MlaConfig& c, MlaExpandedKv<float>& cache, View<const float, 1> gate) {
    const size rope_dim = c.qk_rope_head_dim;
    mla_decode_token(host{1}, c, f(2 * (8 + rope_dim)), f(2 * (8 + rope_dim)), f(12), gate, cache, 0, 1e4,
                     view(big.data() + 500, 12));
  };
  MlaExpandedKv<float> odd_cache(odd, 1);
  check_refused([&] { token(odd, odd_cache, f(12)); }, {"mla_decode_token: geometry.qk_rope_head_dim is 3", "even"});
  CHECK(odd_cache.length() == 0);
  check_refused([&] { token(g, expanded, {}); }, {"gate is absent"});
  check_refused([&] { token(odd, expanded, f(12)); }, {"qk_rope_head_dim"});
  CHECK(expanded.length() == 0);
  token(g, expanded, f(12));
  check_refused([&] { token(g, expanded, f(12)); }, {"capacity of 1 positions (cache full)"});
  check_refused(
      [&] {
        gated_mla_attend(host{1}, g, f(2, 24), f(2, 23), f(2, 12), f(2, 12), 0, 1e4, view(big.data() + 500, 2, 12));
      },
      {"gated_mla_attend: k is [2, 23]"});
}
