// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include <k3/io/expert_layout.hpp>
#include <k3/io/streamed_experts_memory.hpp>
#include <k3/model/use_counts.hpp>

namespace k3 {

/// The routed experts of all layers of a checkpoint in a fixed number of slots, read from the files when they are
/// needed and not there. Memory is taken once, and only slots hold experts: files are read, not mapped. The least
/// used expert makes room (docs/streaming.md), but none that is in use, and none that was announced for the current
/// pass unless there is no other. Reads are split among a few threads and start when a pass announces its experts
/// (`need`), as far as there are slots; the others follow as slots become free. Several threads may use it at once; an
/// announcement then replaces the other's, which loses read-ahead only. Made by `stream_pretrained`
/// (k3/io/checkpoint.hpp). An expert's key is its layer's first key plus its id.
class StreamedExperts {
 public:
  /// For stream_pretrained. `at_once`: the experts of one token in a layer, which set the floor; `half_life`: uses
  /// after which one counts half. Throws invalid_argument below it
  /// and where the system does not give the memory.
  StreamedExperts(std::shared_ptr<const detail::CheckpointStorage> storage, std::vector<detail::BoundExpert> experts,
                  size at_once, double half_life, const StreamingOptions& options)
      : storage_(std::move(storage)),
        experts_(std::move(experts)),
        read_bytes_(options.read_bytes),
        uses_(experts_.size(), half_life) {
    constexpr const char* operation = "StreamedExperts";
    detail::require(options.readers > 0 && options.readers <= 1024, operation, "readers", options.readers, "1 to 1024");
    detail::require(read_bytes_ > 0, operation, "read_bytes", read_bytes_, "at least 1");
    for (const detail::BoundExpert& expert : experts_)
      slot_bytes_ = detail::larger(slot_bytes_, detail::ExpertFileLayout(expert).bytes());
    constexpr size step = detail::ExpertFileLayout::alignment;
    slot_bytes_ = (slot_bytes_ + step - 1) / step * step;
    floor_ = detail::checked_product(operation, "the floor", at_once, slot_bytes_);
    detail::require(options.window > 0 || options.memory >= floor_, operation, "memory", options.memory, [&] {
      return "at least " + std::to_string(floor_) + " bytes, the " + std::to_string(at_once) + " experts of one token";
    });
    const size slots = options.window > 0 ? options.window : slot_bytes_ == 0 ? 0 : options.memory / slot_bytes_;
    slots_.resize(detail::smaller(slots, experts_.size()));
    queue_.resize(slots_.size());
    where_.assign(experts_.size(), nowhere);
    announced_.reserve(experts_.size());
    memory_ = detail::SlotMemory(memory(), options.allocate);
    if (options.window > 0) unrelated_.resize(size{5} << 19);
    for (const MappedFile& file : storage_->files->files()) file.expect_random_reads();
    start(static_cast<size>(options.readers));
  }
  StreamedExperts(const StreamedExperts&) = delete;
  StreamedExperts& operator=(const StreamedExperts&) = delete;
  ~StreamedExperts() { stop(); }

  size slots() const { return slots_.size(); }
  size slot_bytes() const { return slot_bytes_; }
  /// Bytes that the slots have.
  size memory() const { return slots_.size() * slot_bytes_; }
  /// The least memory that is taken: the experts of one token in one layer.
  size floor() const { return floor_; }
  StreamingStatistics statistics() const {
    const std::lock_guard lock(mutex_);
    return statistics_;
  }

  /// Announces the experts `first + ids[i]`, which will be acquired in this order, in place of those announced before.
  void need(size first, const size* ids, size count) {
    bool any = false;
    {
      const std::lock_guard lock(mutex_);
      for (const size key : announced_)
        if (where_[key] != nowhere) slots_[where_[key]].awaited = false;
      announced_.clear();
      for (size i = 0; i < count; ++i) announced_.push_back(first + ids[i]);
      next_ = 0;
      for (const size key : announced_)
        if (where_[key] != nowhere) slots_[where_[key]].awaited = true;
      any = read_ahead();
    }
    if (any) work_.notify_all();  // without the lock, which they want
  }

  /// The expert, which stays where it is until it is released. Waits for its read, or for a slot. Throws format_error,
  /// naming file, tensor and byte, where a read fails or comes short and for scale byte 255.
  ExpertWeights acquire(size key) {
    std::unique_lock lock(mutex_);
    const size s = take(lock, key);
    changed_.wait(lock, [&] { return slots_[s].unread == 0; });
    if (slots_[s].failure) give_up(s);
    return weights(s, key);
  }

  void release(size key) noexcept {
    bool any = false;
    {
      const std::lock_guard lock(mutex_);
      const size s = where_[key];
      if (--slots_[s].users > 0) return;
      if (slots_[s].failure && slots_[s].unread == 0) empty(s);
      any = read_ahead();
    }
    changed_.notify_all();
    if (any) work_.notify_all();
  }

 private:
  static constexpr size nowhere = ~size{0};

  struct Slot {
    size key = nowhere;
    size unread = 0;           // reads that are not done, and one more while not all have begun
    size range = 0;            // the next read: of this range of the expert's layout,
    std::uint64_t offset = 0;  // from here on
    size users = 0;
    bool awaited = false;  // announced and not used yet
    bool fresh = false;    // read and not used yet
    std::exception_ptr failure{};
  };
  struct Read {
    size slot = nowhere;
    std::uint32_t file = 0;
    std::uint64_t begin = 0, end = 0;
    size offset = 0;  // in the slot
  };
  void start(size readers) {
    try {
      for (size i = 0; i < readers; ++i) readers_.emplace_back([this] { read_loop(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  void stop() noexcept {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& reader : readers_) reader.join();
  }

  std::byte* block(size s) const { return memory_.data() + s * slot_bytes_; }

  ExpertWeights weights(size s, size key) const {
    const detail::BoundExpert& expert = experts_[key];
    const detail::ExpertFileLayout layout(expert);
    ExpertWeights result = expert.weights;
    for (size i = 0; i < 3; ++i) {
      AnyMatrix<>& matrix = detail::matrix_of(result, i);
      matrix.data = layout.at(block(s), expert.data[i]);
      matrix.scale = reinterpret_cast<const std::uint8_t*>(layout.at(block(s), expert.scale[i]));
    }
    return result;
  }

  // From here to read_loop: with the lock held.

  /// A slot with the expert, or where it is being read, for one user more. Counts the use.
  size take(std::unique_lock<std::mutex>& lock, size key) {
    size s = where_[key];
    while (s == nowhere) {
      if ((s = victim(true)) != nowhere) {
        begin_read(s, key);
        work_.notify_all();
      } else {
        changed_.wait(lock);
        s = where_[key];
      }
    }
    Slot& slot = slots_[s];
    ++slot.users;
    slot.awaited = false;
    uses_.use(key);
    ++(slot.fresh ? statistics_.misses : statistics_.hits);
    slot.fresh = false;
    return s;
  }

  /// Begins reads of announced experts as long as there are slots for them; whether there were any.
  bool read_ahead() {
    bool any = false;
    for (; next_ < announced_.size(); ++next_) {
      const size key = announced_[next_];
      if (where_[key] != nowhere) continue;
      const size s = victim(false);
      if (s == nowhere) break;
      begin_read(s, key);
      slots_[s].awaited = any = true;
    }
    return any;
  }

  /// A free slot, or that of the least used expert that may go, emptied; announced experts go only for one that is
  /// waited for.
  size victim(bool waited_for) {
    size best = nowhere;
    double least = 0;
    for (const bool awaited : {false, true}) {
      for (size s = 0; s < slots_.size(); ++s) {
        const Slot& slot = slots_[s];
        if (slot.key == nowhere) return s;
        const double uses = uses_[slot.key];
        if (best != nowhere && uses >= least) continue;
        if (slot.users > 0 || slot.unread > 0 || slot.awaited != awaited) continue;
        best = s;
        least = uses;
      }
      if (best != nowhere || !waited_for) break;
    }
    return best == nowhere ? nowhere : empty(best);
  }
  size empty(size s) {
    Slot& slot = slots_[s];
    if (slot.key != nowhere) where_[slot.key] = nowhere;
    slot.key = nowhere;
    slot.failure = nullptr;
    slot.awaited = false;
    return s;
  }

  void begin_read(size s, size key) {
    Slot& slot = slots_[s];
    slot.key = key;
    slot.fresh = true;
    slot.unread = 1;
    slot.range = slot.offset = 0;
    where_[key] = s;
    queue_[(queue_first_ + queued_++) % queue_.size()] = s;
  }

  /// The next part of the slot that has waited longest.
  Read next_read() {
    const size s = queue_[queue_first_];
    Slot& slot = slots_[s];
    const detail::ExpertFileLayout layout(experts_[slot.key]);
    const detail::ExpertFileLayout::Range& range = layout.begin()[slot.range];
    const std::uint64_t begin = range.begin + slot.offset;
    const Read read{s, range.file, begin, begin + detail::smaller<std::uint64_t>(range.end - begin, read_bytes_),
                    range.offset + slot.offset};
    slot.offset += read.end - read.begin;
    if (read.end == range.end) {
      ++slot.range;
      slot.offset = 0;
    }
    if (&range + 1 == layout.end() && read.end == range.end) {
      queue_first_ = (queue_first_ + 1) % queue_.size();
      --queued_;
    } else {
      ++slot.unread;
    }
    return read;
  }

  /// Throws what went wrong with a slot's read; the last user to do so empties it.
  [[noreturn]] void give_up(size s) {
    const std::exception_ptr failure = slots_[s].failure;
    if (--slots_[s].users == 0) {
      empty(s);
      changed_.notify_all();
    }
    std::rethrow_exception(failure);
  }

  void read_loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [&] { return stopping_ || queued_ > 0; });
      if (stopping_) return;
      const Read read = next_read();
      const size key = slots_[read.slot].key;
      lock.unlock();
      const std::exception_ptr failure = run(key, [&](const detail::ExpertFileLayout& layout) {
        fetch(read, layout);
        check_scales(read, key);
      });
      lock.lock();
      Slot& slot = slots_[read.slot];
      if (!failure) statistics_.bytes_read += read.end - read.begin;
      if (failure && !slot.failure) slot.failure = failure;
      if (--slot.unread == 0) changed_.notify_all();
      if (unrelated_.empty() || queued_ > 0 || next_ < announced_.size()) continue;
      lock.unlock();
      leave_cache();
      lock.lock();
    }
  }

  /// What a processor has written last stays in its own cache, where a device is slow to get it: a third of the time
  /// more for the last expert of a layer. Reading something else moves it on to the cache that all processors share.
  void leave_cache() const noexcept {
    constexpr size line = 64;
    for (size at = 0; at < unrelated_.size(); at += line)
      static_cast<void>(*static_cast<const volatile std::byte*>(unrelated_.data() + at));
  }

  /// What body(layout of an expert) throws.
  template <class Body>
  std::exception_ptr run(size key, Body&& body) const noexcept {
    try {
      body(detail::ExpertFileLayout(experts_[key]));
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }
  void fetch(const Read& read, const detail::ExpertFileLayout& layout) const {
    const MappedFile& file = storage_->files->files()[read.file];
    const MappedFile::ReadEnd stopped = file.read(read.begin, read.end, block(read.slot) + read.offset);
    if (stopped.at == read.end) return;
    const TensorInfo* const tensor = layout.tensor_at(read.file, stopped.at);
    throw format_error(file.path(), tensor ? detail::printable(tensor->name) : "",
                       stopped.code == 0 ? "the file ends here, though it was longer when it was opened"
                                         : "cannot be read: " + std::generic_category().message(stopped.code),
                       stopped.at);
  }
  /// The scales among the bytes just read, which are still in the cache.
  void check_scales(const Read& read, size key) const {
    for (const TensorInfo* scale : experts_[key].scale) {
      if (!scale || scale->file != read.file) continue;
      const std::uint64_t begin = detail::larger(scale->begin, read.begin), end = detail::smaller(scale->end, read.end);
      if (begin >= end) continue;
      const std::byte* const first = block(read.slot) + read.offset + (begin - read.begin);
      detail::check_scales(*storage_->files, *scale, first, begin, end);
    }
  }

  std::shared_ptr<const detail::CheckpointStorage> storage_;
  std::vector<detail::BoundExpert> experts_;
  size read_bytes_, slot_bytes_ = 0, floor_ = 0;
  detail::SlotMemory memory_;         // [slots, slot_bytes]
  std::vector<std::byte> unrelated_;  // more than a processor's own cache holds; empty but for a window

  mutable std::mutex mutex_;
  std::condition_variable changed_, work_;  // a slot is read or free; there are reads, or no more
  std::vector<Slot> slots_;
  std::vector<size> where_;      // slot of an expert
  detail::UseCounts uses_;       // of experts, in a slot or not
  std::vector<size> announced_;  // keys
  size next_ = 0;                // the first of them that may have no read yet
  std::vector<size> queue_;      // slots to read, a ring: each is in it once at most
  size queue_first_ = 0, queued_ = 0;
  StreamingStatistics statistics_;
  bool stopping_ = false;
  std::vector<std::thread> readers_;
};

}  // namespace k3
