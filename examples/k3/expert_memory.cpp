// SPDX-License-Identifier: Apache-2.0
// --host-memory and --gpu-memory: where routed experts are kept.

#include <fstream>

#include "tool.hpp"

namespace {

/// A number of bytes, with K, M, G or T for powers of 1024.
std::uint64_t parse_bytes(const std::string& option, const std::string& text) {
  const std::string units = "KMGT";
  const std::size_t unit = text.empty() ? units.npos : units.find(text.back());
  const unsigned shift = unit == units.npos ? 0 : 10 * (static_cast<unsigned>(unit) + 1);
  try {
    return parse_number(option, unit == units.npos ? text : text.substr(0, text.size() - 1), ~std::uint64_t{0} >> shift)
           << shift;
  } catch (const UsageError&) {
    throw UsageError(option + ": \"" + text + "\" is not a number of bytes, such as 800M or 8G, or auto");
  }
}

std::uint64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string key, rest; file >> key; std::getline(file, rest)) {
    std::uint64_t kilobytes = 0;
    if (key == "MemAvailable:" && file >> kilobytes) return kilobytes << 10;
  }
  throw k3::error("--host-memory auto: the system does not say how much memory is available (/proc/meminfo)");
}

/// Nine tenths of what is available, less the rest of the model; caches and everybody else get the remaining tenth.
std::uint64_t memory_for_experts(const k3::Safetensors& files) {
  std::uint64_t trunk = 0;
  for (const k3::TensorInfo& tensor : files.tensors())
    if (!k3::detail::is_vision_tensor(tensor) && tensor.name.find(".experts.") == tensor.name.npos)
      trunk += tensor.bytes();
  const std::uint64_t available = available_memory();
  if (available / 10 * 9 <= trunk)
    throw UsageError("--host-memory auto: the rest of the model takes " + std::to_string(trunk) +
                     " bytes, nine tenths of the " + std::to_string(available) +
                     " that are available or more; a number leaves the rest to the file cache");
  return available / 10 * 9 - trunk;
}

/// The floor of an option, and the experts that need it.
struct Floor {
  std::uint64_t bytes = 0;
  std::size_t experts = 0;
};

[[noreturn]] void refuse_below(const std::string& option, const std::string& text, std::uint64_t bytes,
                               const Floor& floor) {
  const std::string found =
      text == "auto" ? "auto: the " + option_bytes(bytes) + " that are left for experts are" : text + " is";
  throw k3::error(option + " " + found + " below the floor of " + option_bytes(floor.bytes) + " (" +
                  std::to_string(floor.bytes) + " bytes), the " + std::to_string(floor.experts) +
                  " experts that one token uses in one layer");
}

Floor host_floor(const std::string& folder, const std::shared_ptr<const k3::Safetensors>& files) {
  k3::StreamingOptions one;
  one.readers = 1;
  one.window = 1;
  const k3::StreamedModel streamed = k3::stream_pretrained(folder, files, one);
  return {streamed.experts ? streamed.experts->floor() : 0, streamed.model.config.moe.top_k};
}

bool concerns(const k3::invalid_argument& problem, const char* operation) {
  return problem.operation() == operation && problem.argument() == "memory";
}

}  // namespace

void describe_memory(CLI::App& app, ExpertMemory& memory) {
  const auto given = [](const std::string& text) { return std::string(text.empty() ? "needs a number of bytes" : ""); };
  app.add_option("--host-memory", memory.host,
                 "read routed experts on demand into this much memory: bytes, such as 800M or 8G, or auto; without it "
                 "the files are mapped, or, with --backend cuda, read through room for 6 experts")
      ->type_name("BYTES")
      ->check(given, "");
  app.add_option("--gpu-memory", memory.gpu,
                 "with --backend cuda: memory for routed experts on the GPU, bytes or auto: what the rest leaves free "
                 "(the default); what does not fit is read on demand")
      ->type_name("BYTES")
      ->check(given, "");
}

void check_memory(const ExpertMemory& memory, const EngineOptions& engine) {
  if (!memory.gpu.empty() && engine.backend != "cuda") throw UsageError("--gpu-memory: only with --backend cuda");
  if (!memory.gpu.empty() && memory.gpu != "auto") parse_bytes("--gpu-memory", memory.gpu);
  if (!memory.host.empty() && memory.host != "auto") parse_bytes("--host-memory", memory.host);
}

std::string option_bytes(std::uint64_t bytes) {
  std::string unit;
  for (const char* next : {"K", "M", "G", "T"}) {
    if (bytes < 4096) break;
    bytes = bytes / 1024 + (bytes % 1024 > 0);
    unit = next;
  }
  return std::to_string(bytes) + unit;
}

k3::StreamedModel stream_experts(const std::string& folder, const std::shared_ptr<const k3::Safetensors>& files,
                                 const ExpertMemory& memory, const EngineOptions& engine,
                                 const k3::LoadProgress& progress) {
  k3::StreamingOptions streaming;
  if (memory.host.empty())
    streaming.window = 6;
  else
    streaming.memory = memory.host == "auto" ? memory_for_experts(*files) : parse_bytes("--host-memory", memory.host);
  if (engine.backend == "cuda") streaming.allocate = gpu_host_memory;
  try {
    return k3::stream_pretrained(folder, files, streaming, progress);
  } catch (const k3::invalid_argument& problem) {
    if (!concerns(problem, "StreamedExperts")) throw;
  }
  if (streaming.window == 0) {
    const Floor floor = host_floor(folder, files);
    if (streaming.memory < floor.bytes) refuse_below("--host-memory", memory.host, streaming.memory, floor);
  }
  const std::string what = streaming.window > 0 ? "room for 6 experts" : "--host-memory " + memory.host;
  throw k3::error(what + ": the system does not give that much " +
                  (streaming.allocate ? "page-locked memory, which the GPU reads from" : "memory"));
}

std::unique_ptr<Engine> make_engine_for(const k3::K3CpuModel& model, const ExpertMemory& memory, EngineOptions options,
                                        const MoveProgress& progress) {
  if (options.backend != "cuda") return make_engine(model, options, progress);
  const auto floor = [&] { return Floor{gpu_expert_floor(model), model.config.moe.top_k}; };
  const std::string text = memory.gpu.empty() ? "auto" : memory.gpu;
  options.gpu_memory = EngineOptions::automatic;
  if (text != "auto") {
    const std::uint64_t bytes = parse_bytes("--gpu-memory", text);
    if (const Floor least = floor(); bytes < least.bytes) refuse_below("--gpu-memory", text, bytes, least);
    options.gpu_memory = bytes;
  }
  try {
    return make_engine(model, options, progress);
  } catch (const k3::invalid_argument& problem) {
    if (!concerns(problem, "ExpertCache")) throw;
    // What is left is known to the GPU alone.
    refuse_below("--gpu-memory", text, std::strtoull(problem.found().c_str(), nullptr, 10), floor());
  }
}
