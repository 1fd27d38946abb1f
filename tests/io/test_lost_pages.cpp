// SPDX-License-Identifier: Apache-2.0
// Files that lose a part, or a drive that fails, while a model decodes: an error, and no token after it.
#include <sys/resource.h>
#include <sys/wait.h>

#include <filesystem>

#include "io/checkpoint_support.hpp"

using namespace k3;
using namespace k3::test;

namespace {

constexpr size page = 4096;

/// How a child process that runs `body` ends.
template <class Body>
int status_of(Body&& body) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const rlimit none{};
    ::setrlimit(RLIMIT_CORE, &none);
    body();
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return status;
}

int touch(const std::byte* at) { return std::to_integer<int>(*static_cast<const volatile std::byte*>(at)); }

/// Ends a child as SIGBUS does where nobody else handles it.
void default_sigbus() { std::signal(SIGBUS, SIG_DFL); }

/// Tokens handed out before the error, and the error, where `change` happens after `tokens` of them.
struct Decoded {
  std::vector<id> tokens;
  std::string path, problem;
};

template <class Change>
Decoded decode(const std::string& folder, size after, Change&& change) {
  const auto files = std::make_shared<const Safetensors>(open_safetensors_set(folder));
  const K3CpuModel model = from_pretrained(folder, files);
  Decoder<Fp32> decoder(host{1}, model, 8, 1);
  HybridCache<Fp32> cache = decoder.make_cache(1, 64);
  const std::vector<id> prompt = prompt_of("k3-tiny-5l")["ids"].get<std::vector<id>>();
  Decoded got;
  if (after == 0) change();
  try {
    greedy_decode(decoder, cache, 0, view(prompt), {16}, [&](id token) {
      files->require_whole();
      got.tokens.push_back(token);
      if (got.tokens.size() == after) change();
    });
  } catch (const format_error& problem) {
    got.path = problem.path();
    got.problem = problem.what();
  } catch (const invalid_argument& problem) {  // what the zeros led to, before a token was chosen
    got.problem = problem.what();
  }
  return got;
}

}  // namespace

TEST_CASE("lost pages: zeros, and the file is not whole", "[lost_pages]") {
  catch_lost_pages();
  catch_lost_pages();
  const test::ScratchFolder folder;
  test::write_file(folder / "x", std::string(4 * page, 'x'));
  test::write_file(folder / "y", std::string(4 * page, 'y'));
  MappedFile file(folder / "x");
  const MappedFile other(folder / "y");
  CHECK_NOTHROW(file.require_whole());
  std::filesystem::resize_file(folder / "x", page + 100);
  CHECK(touch(file.data() + page + 99) == 'x');
  CHECK(touch(file.data() + page + 100) == 0);  // the rest of its last page
  CHECK(touch(file.data() + 3 * page + 5) == 0);
  CHECK(touch(file.data() + 2 * page) == 0);
  CHECK(touch(other.data() + 3 * page) == 'y');
  CHECK(other.still_whole());
  const MappedFile moved = std::move(file);
  CHECK_FALSE(moved.still_whole());
  const auto problem = thrown<format_error>([&] { moved.require_whole(); });
  CHECK(problem.path() == folder / "x");
  CHECK(problem.offset() == page + 100);
  CHECK(contains(problem.what(), "the file ends here, though it was longer when it was opened"));
  // As long as before, and still not what was opened.
  std::filesystem::resize_file(folder / "x", 4 * page);
  const auto lost = thrown<format_error>([&] { moved.require_whole(); });
  CHECK(contains(lost.what(), "cannot be read"));
  CHECK(lost.offset() == 2 * page);
  // A map that comes to lie at the same place starts anew.
  {
    const MappedFile gone(folder / "y");
  }
  const MappedFile again(folder / "y");
  CHECK(again.still_whole());
  CHECK(touch(again.data() + 3 * page) == 'y');
}

TEST_CASE("lost pages: a file that was written to is not whole", "[lost_pages]") {
  const test::ScratchFolder folder;
  test::write_file(folder / "x", std::string(page, 'x'));
  const MappedFile file(folder / "x");
  std::filesystem::last_write_time(folder / "x", std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  CHECK_FALSE(file.still_whole());
  CHECK(contains(thrown<format_error>([&] { file.require_whole(); }).what(), "has changed since it was opened"));
}

TEST_CASE("lost pages: a file that was rewritten with its old size and time of change is not whole", "[lost_pages]") {
  const test::ScratchFolder folder;
  const std::string path = folder / "x";
  const auto apart = [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };  // ticks of the file system
  const auto check_changed = [&](const char* what, auto&& change) {
    INFO(what);
    test::replace_file(path, std::string(page, 'x'));
    apart();
    const MappedFile file(path);
    struct stat before{}, after{};
    REQUIRE(::stat(path.c_str(), &before) == 0);
    apart();
    CHECK(touch(file.data()) == 'x');
    CHECK(file.still_whole());  // reading changes nothing
    change();
    const timespec times[] = {before.st_atim, before.st_mtim};
    REQUIRE(::utimensat(AT_FDCWD, path.c_str(), times, 0) == 0);
    REQUIRE(::stat(path.c_str(), &after) == 0);
    CHECK(after.st_size == before.st_size);
    CHECK(after.st_mtim.tv_sec == before.st_mtim.tv_sec);
    CHECK(after.st_mtim.tv_nsec == before.st_mtim.tv_nsec);
    CHECK_FALSE(file.still_whole());
    CHECK(contains(thrown<format_error>([&] { file.require_whole(); }).what(), "has changed since it was opened"));
    MappedFile moved;
    moved = MappedFile(path);
    CHECK(moved.still_whole());
  };
  check_changed("written in place", [&] {
    std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
    stream.write("y", 1);
  });
  check_changed("cut and filled again", [&] { test::write_file(path, std::string(page, 'y')); });
  check_changed("another file in its place", [&] {
    test::write_file(folder / "y", std::string(page, 'y'));
    std::filesystem::rename(folder / "y", path);
  });
}

TEST_CASE("lost pages: other faults end the process as before", "[lost_pages]") {
  const test::ScratchFolder folder;
  test::write_file(folder / "x", std::string(2 * page, 'x'));
  const auto cut_and_touch = [&] {
    const MappedFile file(folder / "x");
    std::filesystem::resize_file(folder / "x", 1);
    touch(file.data() + page);
  };
  const int without = status_of([&] {
    default_sigbus();
    cut_and_touch();
  });
  CHECK(WIFSIGNALED(without));
  CHECK(WTERMSIG(without) == SIGBUS);
  test::write_file(folder / "x", std::string(2 * page, 'x'));
  CHECK(status_of([&] {
          catch_lost_pages();
          cut_and_touch();
        }) == 0);
  test::write_file(folder / "x", std::string(2 * page, 'x'));
  const int elsewhere = status_of([&] {
    catch_lost_pages();
    detail::map_records().before.sa_flags = 0;
    detail::map_records().before.sa_handler = SIG_DFL;
    const int file = ::open((folder / "x").c_str(), O_RDONLY);
    const void* const map = ::mmap(nullptr, 2 * page, PROT_READ, MAP_SHARED, file, 0);
    std::filesystem::resize_file(folder / "x", 1);
    touch(static_cast<const std::byte*>(map) + page);
  });
  CHECK(WIFSIGNALED(elsewhere));
  CHECK(WTERMSIG(elsewhere) == SIGBUS);
}

TEST_CASE("lost pages: decoding ends with the file's name and no wrong token", "[lost_pages]") {
  catch_lost_pages();
  const MutableCheckpoint checkpoint("k3-tiny-5l");
  const std::vector<id> expected = prompt_of("k3-tiny-5l")["generated"].get<std::vector<id>>();
  for (size shard = 0; shard < checkpoint.shard_count(); ++shard)
    for (const size after : {size{0}, size{1}, size{5}})
      for (const int sixteenths : {0, 1, 8, 15, 16}) {  // 16: one byte less
        CAPTURE(shard, after, sixteenths);
        const ScratchFolder folder;
        checkpoint.write(folder);
        const std::string path = folder / checkpoint.shard_name(shard);
        const std::uintmax_t bytes = std::filesystem::file_size(path);
        const Decoded got = decode(folder.path, after, [&] {
          std::filesystem::resize_file(path, sixteenths == 16 ? bytes - 1 : bytes * unsigned(sixteenths) / 16);
        });
        INFO(got.problem);
        CHECK(!got.problem.empty());
        CHECK((got.path == path || contains(got.problem, "NaN")));
        CHECK(got.tokens == std::vector<id>(expected.begin(), expected.begin() + long(after)));
      }
  const ScratchFolder folder;
  checkpoint.write(folder);
  const Decoded whole = decode(folder.path, 99, [] {});
  CHECK(whole.problem.empty());
  CHECK(whole.tokens == expected);
}

TEST_CASE("lost pages: a file that is cut while others read it from several threads", "[lost_pages]") {
  catch_lost_pages();
  const test::ScratchFolder folder;
  for (int round = 0; round < 20; ++round) {
    test::replace_file(folder / "x", std::string(64 * page, 'x'));
    const MappedFile file(folder / "x");
    std::vector<std::thread> readers;
    std::atomic<int> odd{0};
    for (int t = 0; t < 3; ++t)
      readers.emplace_back([&] {
        for (int pass = 0; pass < 20; ++pass)
          for (size at = 0; at < 64 * page; at += page / 2) {
            const int value = touch(file.data() + at);
            odd += value != 'x' && value != 0;
          }
      });
    std::filesystem::resize_file(folder / "x", size{1} + 3 * static_cast<size>(round) * page);
    for (std::thread& reader : readers) reader.join();
    CHECK(odd == 0);
    CHECK_FALSE(file.still_whole());
  }
}
