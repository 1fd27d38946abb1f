// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include <k3/io/expert_layout.hpp>
#include <k3/model/use_counts.hpp>

namespace k3 {

/// How experts are streamed.
struct StreamingOptions {
  size memory = 0;                  ///< bytes for experts; at least those of one token's, rounded down to whole experts
  int readers = 16;                 ///< threads that read, and so reads in flight
  size read_bytes = size{9} << 17;  ///< longest read: an expert of the released model is 15
  /// Where not 0: so many slots instead of `memory`, and no floor, for a user that holds fewer at a time. A window for
  /// a GPU to copy from: small enough to stay in the processor's cache, which makes copies almost twice as fast.
  size window = 0;
  /// Where the memory comes from, such as page-locked memory for a GPU to copy from; null: the heap. May give null.
  std::function<std::shared_ptr<std::byte>(size bytes)> allocate{};
};

/// What streaming did so far. A use is a miss where the expert had to be read for it.
struct StreamingStatistics {
  std::uint64_t hits = 0, misses = 0, bytes_read = 0;

  double hit_rate() const {
    return hits + misses == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(hits + misses);
  }
};

/// The routed experts of all layers of a checkpoint in a fixed number of slots, read from the files when they are
/// needed and not there. Memory is taken once, and only slots hold experts: files are read, not mapped. The least
/// used expert makes room (docs/streaming.md), but none that is in use, and none that was announced for the current
/// pass unless there is no other. Reads are split among a few threads and begin when a pass announces its experts
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
    take_memory(options);
    for (const MappedFile& file : storage_->files->files()) file.expect_random_reads();
    start(options.readers);
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
    const std::lock_guard lock(mutex_);
    for (const size key : announced_)
      if (where_[key] != nowhere) slots_[where_[key]].awaited = false;
    announced_.clear();
    for (size i = 0; i < count; ++i) announced_.push_back(first + ids[i]);
    next_ = 0;
    for (const size key : announced_)
      if (where_[key] != nowhere) slots_[where_[key]].awaited = true;
    read_ahead();
  }

  /// The expert, which stays where it is until it is released. Waits for its read, or for a slot. Throws format_error,
  /// naming file, tensor and byte, where a read fails or comes short and for scale byte 255.
  ExpertWeights acquire(size key) {
    std::unique_lock lock(mutex_);
    size s = where_[key];
    while (s == nowhere) {
      if ((s = victim(true)) != nowhere) {
        begin_read(s, key);
      } else {
        changed_.wait(lock);
        s = where_[key];
      }
    }
    Slot& slot = slots_[s];
    ++slot.users;
    slot.awaited = false;
    changed_.wait(lock, [&] { return slot.unread == 0; });
    if (slot.failure) give_up(s);
    uses_.use(key);
    ++(slot.fresh ? statistics_.misses : statistics_.hits);
    slot.fresh = false;
    return weights(s, key);
  }

  void release(size key) noexcept {
    const std::lock_guard lock(mutex_);
    if (--slots_[where_[key]].users > 0) return;
    read_ahead();
    changed_.notify_all();
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
    size slot;
    std::uint32_t file;
    std::uint64_t begin, end;
    size offset;
  };
  struct Free {
    void operator()(std::byte* memory) const {
      ::operator delete(memory, std::align_val_t{detail::ExpertFileLayout::alignment});
    }
  };

  void take_memory(const StreamingOptions& options) {
    if (memory() == 0) return;
    constexpr std::align_val_t alignment{detail::ExpertFileLayout::alignment};
    try {
      if (options.allocate)
        given_ = options.allocate(memory());
      else
        heap_.reset(static_cast<std::byte*>(::operator new(memory(), alignment)));
    } catch (const std::bad_alloc&) {
    }
    memory_ = given_ ? given_.get() : heap_.get();
    if (!memory_)
      throw invalid_argument("StreamedExperts", "memory", std::to_string(memory()), "what the system can give");
  }

  void start(int readers) {
    try {
      for (int i = 0; i < readers; ++i) readers_.emplace_back([this] { read_loop(); });
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

  std::byte* block(size s) const { return memory_ + s * slot_bytes_; }

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

  /// Begins reads of announced experts as long as there are slots for them.
  void read_ahead() {
    for (; next_ < announced_.size(); ++next_) {
      const size key = announced_[next_];
      if (where_[key] != nowhere) continue;
      const size s = victim(false);
      if (s == nowhere) return;
      begin_read(s, key);
      slots_[s].awaited = true;
    }
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
    work_.notify_all();
  }

  /// The next part of the slot that has waited longest.
  Read next_read() {
    const size s = queue_[queue_first_];
    Slot& slot = slots_[s];
    const detail::ExpertFileLayout layout(experts_[slot.key]);
    const detail::ExpertFileLayout::Range& range = layout.begin()[slot.range];
    const std::uint64_t begin = range.begin + slot.offset;
    const Read read{s, range.file, begin, begin + detail::smaller(range.end - begin, read_bytes_),
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
      std::exception_ptr failure = run(key, [&](const detail::ExpertFileLayout& layout) { fetch(read, layout); });
      lock.lock();
      Slot& slot = slots_[read.slot];
      if (!failure) statistics_.bytes_read += read.end - read.begin;
      if (failure && !slot.failure) slot.failure = failure;
      if (slot.unread == 1 && !slot.failure) {
        // Nobody else touches a slot with unread parts.
        lock.unlock();
        failure = run(key, [&](const detail::ExpertFileLayout& layout) { check_scales(read.slot, key, layout); });
        lock.lock();
        slot.failure = failure;
      }
      if (--slot.unread == 0) changed_.notify_all();
    }
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
  void check_scales(size s, size key, const detail::ExpertFileLayout& layout) const {
    for (const TensorInfo* scale : experts_[key].scale)
      if (scale) detail::check_scales(*storage_->files, *scale, layout.at(block(s), scale));
  }

  std::shared_ptr<const detail::CheckpointStorage> storage_;
  std::vector<detail::BoundExpert> experts_;
  size read_bytes_, slot_bytes_ = 0, floor_ = 0;
  std::unique_ptr<std::byte, Free> heap_;  // one of the two
  std::shared_ptr<std::byte> given_;
  std::byte* memory_ = nullptr;  // [slots, slot_bytes]

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
