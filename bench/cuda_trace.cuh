// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cxxabi.h>

#include "cuda_harness.cuh"

// Where the time of a captured graph goes: the graph is cut behind its first, second, third... node, each cut is timed,
// and the differences are what every node adds, with the launch gaps and overlaps it has in its place.
namespace k3::bench {

/// The kernel's name without namespaces, arguments and template arguments, and its grid.
inline std::string node_name(cudaGraphNode_t node) {
  cudaGraphNodeType type;
  check_cuda(cudaGraphNodeGetType(node, &type));
  if (type == cudaGraphNodeTypeMemcpy) return "copy";
  if (type == cudaGraphNodeTypeMemset) return "memset";
  if (type != cudaGraphNodeTypeKernel) return "other";
  cudaKernelNodeParams launch{};
  check_cuda(cudaGraphKernelNodeGetParams(node, &launch));
  const char* symbol = nullptr;
  std::string name = "kernel";
  const cudaError_t found = cudaFuncGetName(&symbol, launch.func);
  detail::ignore_cuda(found);
  if (found == cudaSuccess && symbol) {
    int status = 0;
    char* text = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
    name = text ? text : symbol;
    std::free(text);
    name = name.substr(0, name.find_first_of("<("));
    name = name.substr(name.find_last_of(": ") == std::string::npos ? 0 : name.find_last_of(": ") + 1);
  }
  return name + " [" + std::to_string(launch.gridDim.x) + "," + std::to_string(launch.gridDim.y) + "," +
         std::to_string(launch.gridDim.z) + "] x " + std::to_string(launch.blockDim.x);
}

/// Prints one line for each node of `graph`: what it adds, and the time up to and with it. `before` is put on the
/// stream in front of each replay, and puts back what a node that is cut off would have.
template <class Before>
void trace(cudaStream_t stream, cudaGraph_t graph, const std::string& title, int replays, Before&& before) {
  size count = 0;
  check_cuda(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);  // in the order in which they were captured
  check_cuda(cudaGraphGetNodes(graph, nodes.data(), &count));
  std::printf("\n%s: %zu nodes\n%10s %10s\n", title.c_str(), count, "adds us", "up to us");
  double so_far = 0;
  for (size last = 0; last < count; ++last) {
    cudaGraph_t cut = nullptr;
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaGraphClone(&cut, graph));
    for (size i = count; i-- > last + 1;) {
      cudaGraphNode_t node = nullptr;
      check_cuda(cudaGraphNodeFindInClone(&node, nodes[i], cut));
      check_cuda(cudaGraphDestroyNode(node));
    }
    check_cuda(cudaGraphInstantiate(&executable, cut, 0));
    const double us = measure_graph(stream, executable, 1, replays, before).median_us;
    check_cuda(cudaGraphExecDestroy(executable));
    check_cuda(cudaGraphDestroy(cut));
    std::printf("%10.2f %10.2f  %s\n", us - so_far, us, node_name(nodes[last]).c_str());
    so_far = us;
  }
  std::printf("%10.2f in all; the first node carries the launch of the graph\n", so_far);
  std::fflush(stdout);
}

}  // namespace k3::bench
