// SPDX-License-Identifier: Apache-2.0
// A drive that fails: pread, which this program replaces, returns an error from a place in a file on.
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include <k3/io/tokenizer.hpp>

#include "io/checkpoint_support.hpp"

using namespace k3;
using namespace k3::test;

namespace {

/// The file (by number) that fails from `from` on, and how; 0: none.
std::atomic<ino_t> failing{0};
std::atomic<off_t> fails_from{0};
std::atomic<int> failure{EIO};
std::atomic<int> failures{0};

}  // namespace

// What the library is linked with here in place of the system's.
extern "C" ssize_t pread(int file, void* to, size_t bytes, off_t from) {
  struct stat status{};
  if (failing != 0 && ::fstat(file, &status) == 0 && status.st_ino == failing) {
    const off_t good = fails_from - from;
    if (good <= 0) {
      ++failures;
      errno = failure;
      return -1;
    }
    if (static_cast<off_t>(bytes) > good) bytes = static_cast<size_t>(good);
  }
  return ::syscall(SYS_pread64, file, to, bytes, from);
}

namespace {

/// While one lives, a file fails from a byte on.
struct Failing {
  Failing(const std::string& path, size from, int code = EIO) {
    struct stat status{};
    REQUIRE(::stat(path.c_str(), &status) == 0);
    failures = 0;
    failure = code;
    fails_from = static_cast<off_t>(from);
    failing = status.st_ino;
  }
  ~Failing() { failing = 0; }
  Failing(const Failing&) = delete;
  Failing& operator=(const Failing&) = delete;
};

template <class Open>
void check_fails(const std::string& path, size from, Open&& open) {
  CAPTURE(path, from);
  const Failing drive(path, from);
  const auto problem = thrown<format_error>(open);
  INFO(problem.what());
  CHECK(failures > 0);
  CHECK(problem.path() == path);
  CHECK(problem.offset() == from);
  CHECK(contains(problem.what(), "cannot be read: Input/output error"));
}

}  // namespace

TEST_CASE("failing drive: while a checkpoint is opened", "[drive]") {
  const MutableCheckpoint checkpoint("k3-tiny-5l");
  const ScratchFolder folder;
  checkpoint.write(folder);
  const auto open = [&] { from_pretrained(folder.path); };
  for (const std::string& name : folder.names()) {
    for (const size from : {size{0}, size{5}, size{8}, size{200}}) check_fails(folder / name, from, open);
    CHECK_NOTHROW(open());
  }
  // The system's reason is told.
  const Failing drive(folder / "config.json", 0, ENXIO);
  CHECK(contains(thrown<format_error>(open).what(), "No such device or address"));
}

TEST_CASE("failing drive: while a tokenizer is opened", "[drive]") {
  const auto open = [] { Tokenizer::from_directory(austen_path()); };
  for (const char* name : {"tiktoken.model", "tokenizer_config.json"})
    for (const size from : {size{0}, size{100}}) check_fails(austen_path(name), from, open);
  CHECK_NOTHROW(open());
}

TEST_CASE("failing drive: while experts are streamed", "[drive]") {
  const MutableCheckpoint checkpoint("k3-tiny-5l");
  const ScratchFolder folder;
  checkpoint.write(folder);
  const std::vector<id> prompt = prompt_of("k3-tiny-5l")["ids"].get<std::vector<id>>();
  int failed = 0;
  for (size shard = 0; shard < checkpoint.shard_count(); ++shard) {
    const std::string path = folder / checkpoint.shard_name(shard);
    const StreamedModel streamed = stream_pretrained(folder.path, {size{1} << 30});
    {
      Decoder<Fp32> decoder(host{1}, streamed.model, 8, 1);
      HybridCache<Fp32> cache = decoder.make_cache(1, 64);
      const Failing drive(path, 0);
      std::vector<id> tokens;
      const auto problem = thrown<format_error>(
          [&] { greedy_decode(decoder, cache, 0, view(prompt), {4}, [&](id token) { tokens.push_back(token); }); });
      INFO(problem.what());
      CHECK(failures > 0);
      CHECK(tokens.empty());
      CHECK(problem.path() == path);
      CHECK(contains(problem.tensor(), ".experts."));
      CHECK(contains(problem.what(), "Input/output error"));
      ++failed;
    }
    // Working again, reads that failed ahead of their use say so once.
    for (const LayerWeights& layer : streamed.model.weights.layers)
      for (size e = 0; layer.experts && e < layer.experts->size(); ++e) {
        try {
          static_cast<void>((*layer.experts)[e]);
        } catch (const format_error&) {
        }
      }
    check_decodes(streamed.model, "k3-tiny-5l");
  }
  CHECK(failed == 2);
}

TEST_CASE("failing drive: MappedFile tells where and why", "[drive]") {
  const ScratchFolder folder;
  write_file(folder / "x", std::string(10'000, 'x'));
  const MappedFile file(folder / "x");
  std::vector<std::byte> to(10'000);
  const Failing drive(folder / "x", 7'000);
  const MappedFile::ReadEnd end = file.read(100, 9'000, to.data());
  CHECK(end.at == 7'000);
  CHECK(end.code == EIO);
  CHECK(file.read(100, 7'000, to.data()).at == 7'000);
  CHECK(file.still_whole());
  check_fails(folder / "x", 7'000, [&] { file.text(); });
}
