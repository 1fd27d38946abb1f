// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>

#include <k3/core/types.hpp>

namespace k3 {
namespace detail {

/// One mapped file, as a signal handler may look at it. Records are used again and never freed, so that no thread can
/// be caught looking at one that is gone.
struct MapRecord {
  static constexpr std::uintptr_t none = ~std::uintptr_t{0};

  std::atomic<std::uintptr_t> begin{0}, end{0};  // both 0: free
  std::atomic<std::uintptr_t> lost{none};        // first byte that could not be read, counted from begin
  MapRecord* next = nullptr;
};

struct MapRecords {
  std::mutex changing;
  std::atomic<MapRecord*> first{nullptr};
  bool catching = false;
  struct sigaction before{};
};

inline MapRecords& map_records() {
  static MapRecords records;
  return records;
}

inline MapRecord* record_map(const void* data, size bytes) {
  MapRecords& records = map_records();
  const std::lock_guard<std::mutex> lock(records.changing);
  MapRecord* record = records.first.load();
  while (record != nullptr && record->end.load() != 0) record = record->next;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  if (record == nullptr) {
    record = new MapRecord;
    record->next = records.first.load();
    records.first.store(record);
  }
  record->lost.store(MapRecord::none);
  record->begin.store(begin);
  record->end.store(begin + bytes);
  return record;
}

inline void forget_map(MapRecord* record) noexcept {
  if (record == nullptr) return;
  const std::lock_guard<std::mutex> lock(map_records().changing);
  record->begin.store(0);
  record->end.store(0);
}

/// Puts zeros where a mapped file has no bytes any more, so that the thread can go on until someone asks.
inline bool replace_lost_pages(std::uintptr_t address) noexcept {
  for (MapRecord* record = map_records().first.load(); record != nullptr; record = record->next) {
    const std::uintptr_t begin = record->begin.load(), end = record->end.load();
    if (address < begin || address >= end) continue;
    std::uintptr_t known = record->lost.load();
    while (address - begin < known && !record->lost.compare_exchange_weak(known, address - begin)) {
    }
    const std::uintptr_t page = address - address % static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    void* const at = reinterpret_cast<void*>(page);
    return ::mmap(at, end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at;
  }
  return false;
}

inline void on_lost_page(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  const bool done = replace_lost_pages(reinterpret_cast<std::uintptr_t>(info->si_addr));
  errno = error;
  if (done) return;
  const struct sigaction& before = map_records().before;
  if ((before.sa_flags & static_cast<int>(SA_SIGINFO)) != 0)
    before.sa_sigaction(signal, info, context);
  else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
    before.sa_handler(signal);
  else
    ::sigaction(signal, &before, nullptr);  // and the access, tried again, ends the process
}

}  // namespace detail

/// From now on the process survives touching a page of a MappedFile that cannot be read, because the file was cut or
/// the drive failed: zeros take the place of the rest of the map, and the file is no longer whole. Whoever computes
/// from it asks `require_whole` before results are handed out. Without this call such an access ends the process.
/// For programs: changes what SIGBUS does, for good. Faults of other memory do what they did before. Calling it again
/// changes nothing.
inline void catch_lost_pages() {
  detail::MapRecords& records = detail::map_records();
  const std::lock_guard<std::mutex> lock(records.changing);
  if (records.catching) return;
  struct sigaction action{};
  action.sa_sigaction = detail::on_lost_page;
  action.sa_flags = static_cast<int>(SA_SIGINFO | SA_ONSTACK);
  records.catching = ::sigaction(SIGBUS, &action, &records.before) == 0;
}

}  // namespace k3
