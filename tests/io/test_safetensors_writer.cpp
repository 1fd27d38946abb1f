// SPDX-License-Identifier: Apache-2.0
// Writing safetensors: data in pieces, wrong use, outputs that cannot be written.
#include <k3/io/safetensors.hpp>
#include <k3/io/safetensors_writer.hpp>

#include <csignal>
#include <cstring>

#include <sys/resource.h>
#include <sys/stat.h>

#include "io/safetensors_support.hpp"
#include "support/catch.hpp"

using namespace k3;
using namespace k3::test;

TEST_CASE("safetensors: the writer takes data in pieces", "[safetensors]") {
  const test::ScratchFolder folder;
  const std::vector<std::uint8_t> data = pattern(12, 1);
  SafetensorsWriter writer(folder / "x.safetensors");
  writer.declare("none", DType::f32, {0});
  writer.declare("a", DType::u8, {12});
  writer.declare("nothing", DType::f32, {2, 0});
  writer.declare("b", DType::u32, {1});
  writer.write("a", data.data(), 5);
  writer.write("a", data.data() + 5, 0);
  writer.write("a", data.data() + 5, 7);
  writer.write("nothing", nullptr, 0);
  writer.write("b", data.data(), 4);
  CHECK_FALSE(std::filesystem::exists(folder / "x.safetensors"));
  writer.finish();
  const Safetensors file = open_safetensors(folder / "x.safetensors");
  CHECK(std::memcmp(file.data(file.at("a")), data.data(), 12) == 0);
  CHECK(std::memcmp(file.data(file.at("b")), data.data(), 4) == 0);
}

TEST_CASE("safetensors: wrong use of the writer", "[safetensors]") {
  const test::ScratchFolder folder;
  const std::string path = folder / "x.safetensors";
  test::write_file(path, "the older file");
  const std::uint8_t data[8] = {};
  {
    SafetensorsWriter writer(path);
    writer.declare("a", DType::u8, {3});
    writer.declare("b", DType::u8, {4});
    writer.declare("c", DType::u8, {2});
    const auto refused = [&](const char* part, auto&& call) {
      const auto problem = thrown<invalid_argument>(call);
      INFO(problem.what());
      CHECK(contains(problem.what(), path));
      CHECK(contains(problem.what(), part));
    };
    refused("a is declared twice", [&] { writer.declare("a", DType::f32, {1}); });
    refused("__metadata__ is reserved", [&] { writer.declare("__metadata__", DType::f32, {1}); });
    refused("is not UTF-8", [&] { writer.declare("x\xff", DType::f32, {1}); });
    refused("r is of rank 9", [&] { writer.declare("r", DType::u8, std::vector<size>(9, 1)); });
    refused("big is too large", [&] { writer.declare("big", DType::u8, {size{1} << 63, 2}); });
    refused("sum is too large", [&] { writer.declare("sum", DType::u8, {~size{0} - 8}); });
    refused("z is not declared", [&] { writer.write("z", data, 1); });
    refused("b is written when there are only 0 of 3 bytes of a", [&] { writer.write("b", data, 1); });
    refused("d is declared after the first write", [&] { writer.declare("d", DType::u8, {1}); });
    refused("a is 4 bytes, expected at most 3", [&] { writer.write("a", data, 4); });
    writer.write("a", data, 2);
    refused("b is written when there are only 2 of 3 bytes of a", [&] { writer.write("b", data, 4); });
    refused("a is 4 bytes, expected at most 3", [&] { writer.write("a", data, 2); });
    writer.write("a", data, 1);
    writer.write("b", data, 4);
    refused("a is written again after b", [&] { writer.write("a", data, 1); });
    refused("c is 0 of 2 bytes", [&] { writer.finish(); });
    CHECK(test::read_file(path) == "the older file");
  }
  CHECK(test::read_file(path) == "the older file");
  CHECK(folder.names() == std::vector<std::string>{"x.safetensors"});
}

TEST_CASE("safetensors: outputs that cannot be written", "[safetensors]") {
  const test::ScratchFolder folder;
  SECTION("no such folder") {
    const auto problem = thrown<format_error>([&] { SafetensorsWriter writer(folder / "absent/x.safetensors"); });
    CHECK(problem.path() == folder / "absent/x.safetensors");
    CHECK(contains(problem.what(), "No such file or directory"));
  }
  SECTION("the name is a folder's") {
    std::filesystem::create_directory(folder / "x.safetensors");
    SafetensorsWriter writer(folder / "x.safetensors");
    const auto problem = thrown<format_error>([&] { writer.finish(); });
    CHECK(problem.path() == folder / "x.safetensors");
    CHECK(contains(problem.what(), "Is a directory"));
  }
  SECTION("the disk is full in the middle") {
    struct rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
    struct rlimit small = before;
    small.rlim_cur = 10'000;
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    const std::vector<std::uint8_t> data(GENERATE(size{100'000}, size{9'990}));  // fails in write, in close
    {
      SafetensorsWriter writer(folder / "x.safetensors");
      writer.declare("a", DType::u8, {data.size()});
      std::string what;
      try {
        writer.write("a", data.data(), data.size());
        writer.finish();
      } catch (const format_error& problem) {
        what = problem.what();
      }
      ::setrlimit(RLIMIT_FSIZE, &before);
      std::signal(SIGXFSZ, handler);
      CHECK(contains(what, folder / "x.safetensors"));
      CHECK(contains(what, "File too large"));
      CHECK_THROWS_AS(writer.finish(), error);  // there is room again, but bytes are lost
    }
    CHECK(folder.names().empty());
  }
  SECTION("metadata that is no text") {
    SafetensorsOptions options;
    options.metadata["a"] = "\xff";
    SafetensorsWriter writer(folder / "x.safetensors", options);
    CHECK(contains(thrown<invalid_argument>([&] { writer.finish(); }).what(), "is not UTF-8"));
    CHECK(contains(thrown<invalid_argument>([&] { writer.finish(); }).what(), "is not UTF-8"));
  }
}
