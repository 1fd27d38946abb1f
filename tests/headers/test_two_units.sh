#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two translation units that include every header compile without a warning and link into one program, with every
# compiler there is: nothing is defined twice.
# shellcheck source=tests/headers/common.sh
. "$(dirname "$0")/common.sh"
root=$1

# Compiles the headers of stdin into two objects and links them.
links() {  # root, compiler
  local root=$1 compiler=$2 unit
  sed 's|.*|#include <&>|' >"$scratch/all.hpp"
  printf '#include "all.hpp"\nint other();\nint other() { return 0; }\n' >"$scratch/one.cpp"
  printf '#include "all.hpp"\nint other();\nint main() { return other(); }\n' >"$scratch/two.cpp"
  for unit in one two; do
    # shellcheck disable=SC2086  # a compiler may come with arguments
    $compiler "${strict_flags[@]}" -O0 -I"$root/include" ${include_flags[@]+"${include_flags[@]}"} \
      -c "$scratch/$unit.cpp" -o "$scratch/$unit.o" || return 1
  done
  # shellcheck disable=SC2086
  $compiler "$scratch/one.o" "$scratch/two.o" -o "$scratch/program" $libraries
}

planted=$scratch/planted
mkdir -p "$planted/include/k3"
echo 'int not_inline(); int not_inline() { return 1; }' >"$planted/include/k3/planted.hpp"
libraries=$(pkg-config --libs oniguruma 2>/dev/null || echo -lonig)
while IFS= read -r compiler; do
  { headers "$root"; headers "$root" io; } | links "$root" "$compiler" ||
    fail "$compiler: two units with all headers do not link"
  "$scratch/program"
  if echo k3/planted.hpp | links "$planted" "$compiler" 2>/dev/null; then
    fail "a planted double definition was not seen"
  fi
done < <(compilers)
echo "two units with all headers link"
have_nvcc || exit 0

# Two CUDA units and one of the host: they link, agree on the sizes of what they share and compute the same.
cat >"$scratch/shared.hpp" <<'END'
#include <cstdio>
#include <k3/k3.hpp>
#include <vector>

struct Facts {
  std::vector<k3::size> sizes;
  std::vector<float> normed;
  bool operator==(const Facts&) const = default;
};
Facts facts_of_host();
Facts facts_of_cuda();

namespace {
template <class... T>
std::vector<k3::size> sizes_of() {
  return {sizeof(T)..., alignof(T)...};
}
inline Facts facts() {
  using namespace k3;
  Facts result{sizes_of<bf16, host, HostView<float, 1>, HostView<const k3::bf16, 3>, DeviceView<float, 2>,
                        AnyVector<>, AnyMatrix<MemorySpace::device>, KdaConfig, MlaConfig, LatentMoeConfig,
                        GluConfig, K3Config, K3Graph, K3LayerSpec, DecoderGeometry, Ablation, Environment,
                        LayerWeights, DecoderWeights, K3CpuModel, DecoderBatch, KdaState<float, bf16>,
                        MlaKv<float>, CacheSnapshot<Fp32>, RollbackPoint<Bf16>, HybridCache<Fp64>,
                        Decoder<Fp32>, Decoder<Bf16>, GreedyOptions, GreedyResult<float>, RowStatus,
                        invalid_argument, format_error, cuda_error>(),
               std::vector<float>(4)};
  const std::vector<float> x{1, 2, 3, 4}, weight{1, 1, 1, 1};
  rms_norm(host{}, view(x, 1, 4), view(weight), 1e-5f, view(result.normed, 1, 4));
  return result;
}
}  // namespace
END
device_headers "$root" | sed 's|.*|#include <&>|' >"$scratch/all.cuh"
printf '#include "all.cuh"\n#include "shared.hpp"\nFacts facts_of_cuda() { return facts(); }\n' >"$scratch/one.cu"
printf '#include "all.cuh"\nint other() { return 0; }\n' >"$scratch/two.cu"
printf '#include "shared.hpp"\nFacts facts_of_host() { return facts(); }\n' >"$scratch/three.cpp"
cat >"$scratch/main.cpp" <<'END'
#include "shared.hpp"
int other();
int main() {
  const Facts host = facts_of_host(), cuda = facts_of_cuda();
  if (!(host == cuda)) std::puts("the units do not agree");
  return host == cuda && host.normed[0] > 0.36f ? other() : 1;
}
END
nvcc_flags=(-std=c++20 -O0 "-gencode=arch=compute_90a,code=sm_90a" -I"$root/include" -I"$root/kernels")
nvcc "${nvcc_flags[@]}" -c "$scratch/one.cu" -o "$scratch/one.cu.o" &
first=$!
nvcc "${nvcc_flags[@]}" -c "$scratch/two.cu" -o "$scratch/two.cu.o" || fail "nvcc: all headers in one unit"
wait "$first" || fail "nvcc: all headers in one unit"
for unit in three main; do
  g++ -std=c++20 -O0 -I"$root/include" -c "$scratch/$unit.cpp" -o "$scratch/$unit.o" || fail "g++: $unit.cpp"
done
objects=("$scratch/one.cu.o" "$scratch/two.cu.o" "$scratch/three.o" "$scratch/main.o")
nvcc "${objects[@]}" -o "$scratch/program" || fail "two CUDA units and two of the host do not link"
"$scratch/program" || fail "two CUDA units and two of the host: wrong"
printf 'int other() { return 1; }\n' >"$scratch/planted.cu"
nvcc -c "$scratch/planted.cu" -o "$scratch/planted.o"
if nvcc "${objects[@]}" "$scratch/planted.o" -o "$scratch/program" 2>/dev/null; then
  fail "a double definition was not seen"
fi
echo "two CUDA units and two of the host link and agree"
