// SPDX-License-Identifier: Apache-2.0
#include <k3/io/safetensors.hpp>

#include <cstring>
#include <memory>

#include "io/safetensors_support.hpp"
#include "support/catch.hpp"

using namespace k3;
using k3::test::contains;
using k3::test::entry;
using k3::test::thrown;

namespace {

/// Reads a file's content from memory of exactly its size, so that a read beyond it is seen by an address checker.
/// The number of tensors; format_error where the content is refused.
size read_content(const std::string& content) {
  const std::unique_ptr<std::byte[]> memory(new std::byte[content.size()]);
  std::memcpy(memory.get(), content.data(), content.size());
  detail::TensorTable table;
  detail::read_safetensors_header({"some/file"}, 0, memory.get(), content.size(), detail::Listing::from_headers, table);
  return table.tensors.size();
}

format_error refusal(const std::string& content) {
  return thrown<format_error>([&] { read_content(content); });
}

/// `header` must be refused with `part` in the message, which names the file and `tensor`.
void check_refused(const std::string& header, size data_bytes, const std::string& tensor, const std::string& part) {
  CAPTURE(header, data_bytes);
  const format_error problem = refusal(test::file_content(header, data_bytes));
  INFO(problem.what());
  CHECK(problem.path() == "some/file");
  CHECK(contains(problem.what(), "some/file: " + tensor));
  CHECK(problem.tensor() == tensor);
  CHECK(contains(problem.what(), part));
  CHECK(problem.offset() != format_error::no_offset);
  CHECK(problem.offset() <= 8 + header.size() + data_bytes);
}

const std::string good = "{\"__metadata__\":{\"format\":\"pt\"}," + entry("a", "F32", "[2,3]", "[0,24]") + "," +
                         entry("b.weight", "BF16", "[3]", "[24,30]") + "," + entry("e", "U8", "[0]", "[30,30]") + "}";

}  // namespace

TEST_CASE("safetensors: the length of the header (case 51)", "[safetensors]") {
  for (size bytes = 0; bytes < 8; ++bytes) {
    const format_error problem = refusal(std::string(bytes, '\0'));
    CHECK(contains(problem.what(), "has " + std::to_string(bytes) + " bytes"));
  }
  CHECK(contains(refusal(std::string(8, '\xff')).what(), "header length is 18446744073709551615"));
  CHECK(contains(refusal(std::string(100, '\xff')).what(), "but the file has only 92 bytes after it"));
  for (const std::uint64_t length : {std::uint64_t{3}, std::uint64_t{1} << 32, std::uint64_t{1} << 63}) {
    const format_error problem = refusal(test::length_bytes(length) + "{}");
    CHECK(contains(problem.what(), "header length is " + std::to_string(length)));
    CHECK(problem.offset() == 0);
  }
  CHECK(contains(refusal(test::length_bytes(0)).what(), "does not start with '{'"));
  CHECK(read_content(test::length_bytes(2) + "{}") == 0);

  const test::ScratchFolder folder;
  test::write_file(folder / "huge", test::length_bytes(max_safetensors_header + 1) + "{}");
  std::filesystem::resize_file(folder / "huge", max_safetensors_header + 1000);  // a sparse file
  const auto problem = thrown<format_error>([&] { open_safetensors(folder / "huge"); });
  CHECK(contains(problem.what(), "huge: header length is 100000001, more than the limit of 100000000"));
  test::write_file(folder / "empty", "");
  CHECK(contains(thrown<format_error>([&] { open_safetensors(folder / "empty"); }).what(), "empty: has 0 bytes"));
}

TEST_CASE("safetensors: a header that is no JSON object", "[safetensors]") {
  check_refused(" {}", 0, "", "does not start with '{'");
  check_refused("\xef\xbb\xbf{}", 0, "", "does not start with '{'");
  check_refused("[]", 0, "", "does not start with '{'");
  check_refused("{", 0, "", "does not end with '}'");
  check_refused("{}\n", 0, "", "does not end with '}'");
  check_refused("{}x", 0, "", "does not end with '}'");
  check_refused(std::string("{}\0", 3), 0, "", "does not end with '}'");
  check_refused(std::string("{}\0{}", 5), 0, "", "a NUL byte");
  check_refused("{}}", 0, "", "invalid JSON");
  check_refused("{} {}", 0, "", "invalid JSON");
  check_refused("{\"a\"}", 0, "a", "invalid JSON");
  check_refused("{,}", 0, "", "invalid JSON");
  check_refused("{'a':1}", 0, "", "invalid JSON");
  check_refused("{/**/}", 0, "", "invalid JSON");
  check_refused("{\"\xff\":{}}", 0, "", "ill-formed UTF-8");
  check_refused("{\"\xc0\x80\":{}}", 0, "", "ill-formed UTF-8");
  check_refused("{\"\\ud800\":{}}", 0, "", "surrogate");
  check_refused("{" + entry("a", "U8", "[1]", "[0,1]"), 1, "", "invalid JSON");
  CHECK(read_content(
            test::file_content("{ \"a\" :\n{\"dtype\":\"U8\" ,\"shape\":[ ], \"data_offsets\":[0,1]}\t}   ", 1)) == 1);

  const format_error problem = refusal(test::file_content("{\"a\":#}", 0));  // '#' is byte 8 + 5
  CHECK(problem.offset() == 13);
  const format_error early = refusal(test::file_content("{\"a\":{\"dtype\":7}}", 0));  // reported just behind the 7
  CHECK((early.offset() == 8 + 14 || early.offset() == 8 + 15));
}

TEST_CASE("safetensors: what an entry must be", "[safetensors]") {
  const auto one = [](const std::string& fields) { return "{\"t.w\":" + fields + "}"; };
  const std::string dtype = "\"dtype\":\"U8\"", shape = "\"shape\":[1]", offsets = "\"data_offsets\":[0,1]";
  CHECK(read_content(test::file_content(one("{" + offsets + "," + shape + "," + dtype + "}"), 1)) == 1);

  for (const char* value : {"1", "-1", "1.5", "null", "true", "false", "\"x\"", "[]"})
    check_refused(one(value), 1, "t.w", "expected an object with dtype, shape and data_offsets, found");
  check_refused(one("{" + shape + "," + offsets + "}"), 1, "t.w", "has no dtype");
  check_refused(one("{" + dtype + "," + offsets + "}"), 1, "t.w", "has no shape");
  check_refused(one("{" + dtype + "," + shape + "}"), 1, "t.w", "has no data_offsets");
  check_refused(one("{}"), 0, "t.w", "has no dtype");
  check_refused(one("{" + dtype + "," + shape + "," + offsets + ",\"strides\":[1]}"), 1, "t.w",
                "unknown field \"strides\"");
  check_refused(one("{" + dtype + "," + dtype + "," + shape + "," + offsets + "}"), 1, "t.w", "dtype comes twice");
  check_refused(one("{" + dtype + "," + shape + "," + shape + "," + offsets + "}"), 1, "t.w", "shape comes twice");
  check_refused(one("{" + dtype + "," + shape + "," + offsets + "," + offsets + "}"), 1, "t.w",
                "data_offsets comes twice");

  for (const char* value : {"1", "null", "[]", "{}", "true"})
    check_refused(one("{\"dtype\":" + std::string(value) + "}"), 1, "t.w", "expected dtype to be a string");
  for (const char* value : {"\"F128\"", "\"\"", "\"f32\"", "\"BF16 \"", "\"U8\\u0000\""})
    check_refused(one("{\"dtype\":" + std::string(value) + "}"), 1, "t.w", "unknown dtype: ");
  check_refused(one("{\"dtype\":\"F128\"}"), 1, "t.w", "unknown dtype: F128");
  for (const char* value : {"F4", "F6_E2M3", "F6_E3M2"})
    check_refused(one("{\"dtype\":\"" + std::string(value) + "\"}"), 1, "t.w",
                  "not supported (elements smaller than a byte): ");

  for (const char* value : {"1", "null", "{}", "\"1\""})
    check_refused(one("{\"shape\":" + std::string(value) + "}"), 1, "t.w", "expected shape to be a list");
  for (const char* value : {"[-1]", "[-0]", "[1.0]", "[1e2]", "[18446744073709551616]", "[\"1\"]", "[null]", "[[1]]",
                            "[{}]", "[true]", "[1,2,-3]"})
    check_refused(one("{\"shape\":" + std::string(value) + "}"), 1, "t.w", "expected shape to hold whole numbers");
  check_refused(one("{\"shape\":[1e999]}"), 1, "t.w", "invalid JSON");
  check_refused(one("{\"shape\":[1,1,1,1,1,1,1,1,1]}"), 1, "t.w", "more than 8 dimensions");

  for (const char* value : {"1", "null", "{}", "\"1\""})
    check_refused(one("{\"data_offsets\":" + std::string(value) + "}"), 1, "t.w", "expected data_offsets to be a list");
  for (const char* value : {"[-1,1]", "[0,1.0]", "[0,18446744073709551616]", "[\"0\",1]", "[0,[1]]", "[0,1,2]"})
    check_refused(one("{\"data_offsets\":" + std::string(value) + "}"), 1, "t.w", "expected data_offsets to hold two");
  check_refused(one("{\"data_offsets\":[]}"), 1, "t.w", "data_offsets has 0 numbers");
  check_refused(one("{\"data_offsets\":[0]}"), 1, "t.w", "data_offsets has 1 numbers");
}

TEST_CASE("safetensors: names that come twice (case 52)", "[safetensors]") {
  const std::string a = entry("a", "U8", "[1]", "[0,1]");
  check_refused("{" + a + "," + a + "}", 1, "a", "comes twice in the header");
  check_refused("{" + a + "," + entry("a", "U8", "[1]", "[1,2]") + "}", 2, "a", "comes twice in the header");
  check_refused("{" + a + "," + entry("\\u0061", "U8", "[1]", "[1,2]") + "}", 2, "a", "comes twice in the header");
  check_refused("{" + a + "," + entry("b", "U8", "[1]", "[1,2]") + "," + entry("a", "U8", "[1]", "[2,3]") + "}", 3, "a",
                "twice");
}

TEST_CASE("safetensors: metadata holds strings by name", "[safetensors]") {
  const auto with = [](const std::string& value) { return "{\"__metadata__\":" + value + "}"; };
  CHECK(read_content(test::file_content(with("{}"), 0)) == 0);
  CHECK(read_content(test::file_content(with("{\"a\":\"b\",\"c\":\"\"}"), 0)) == 0);
  for (const char* value : {"1", "null", "\"x\"", "[]", "true"})
    check_refused(with(value), 0, "", "expected __metadata__ to be an object");
  for (const char* value : {"1", "null", "[]", "{}", "true", "1.5", "-1"})
    check_refused(with("{\"a\":" + std::string(value) + "}"), 0, "", "expected __metadata__ to hold strings only");
  check_refused(with("{\"a\":\"b\",\"a\":\"b\"}"), 0, "", "the key \"a\" of __metadata__ comes twice");
  check_refused("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "", "__metadata__ comes twice");
}

TEST_CASE("safetensors: byte ranges (case 53)", "[safetensors]") {
  const auto one = [](const char* dtype, const char* shape, const char* range) {
    return "{" + entry("t", dtype, shape, range) + "}";
  };
  check_refused(one("F32", "[1000,1000]", "[0,4]"), 4, "t", "hold 4 bytes, but F32 [1000, 1000] needs 4000000");
  check_refused(one("F32", "[3]", "[0,16]"), 16, "t", "hold 16 bytes, but F32 [3] needs 12");
  check_refused(one("F32", "[1]", "[4,0]"), 4, "t", "[4, 0) end before they begin");
  check_refused(one("F32", "[4]", "[0,16]"), 12, "t", "[0, 16) end beyond the file, which holds 12 data bytes");
  check_refused(one("U8", "[18446744073709551615]", "[0,18446744073709551615]"), 4, "t", "end beyond the file");
  check_refused(one("F32", "[4611686018427387905]", "[0,4]"), 4, "t", "is too large");
  check_refused(one("U8", "[4294967296,4294967296]", "[0,0]"), 0, "t", "is too large");
  check_refused(one("U8", "[0,4294967296,4294967296]", "[0,0]"), 0, "t", "is too large");
  check_refused(one("BOOL", "[]", "[0,0]"), 0, "t", "hold 0 bytes, but BOOL [] needs 1");
  CHECK(read_content(test::file_content(one("U8", "[0,4294967296,5]", "[0,0]"), 0)) == 1);
}

TEST_CASE("safetensors: gaps, overlaps and bytes at the end", "[safetensors]") {
  const auto bytes = [](const char* name, int first, int last) {
    return entry(name, "U8", "[" + std::to_string(last - first) + "]",
                 "[" + std::to_string(first) + "," + std::to_string(last) + "]");
  };
  CHECK(read_content(test::file_content("{" + bytes("b", 2, 4) + "," + bytes("z", 2, 2) + "," + bytes("a", 0, 2) + "}",
                                        4)) == 3);
  check_refused("{" + bytes("a", 1, 2) + "}", 2, "a", "a gap of 1 bytes lies before its data");
  check_refused("{" + bytes("a", 0, 2) + "," + bytes("b", 5, 6) + "}", 6, "b", "a gap of 3 bytes lies before its data");
  check_refused("{" + bytes("b", 5, 6) + "," + bytes("a", 0, 2) + "}", 6, "b", "a gap of 3 bytes lies before its data");
  check_refused("{" + bytes("a", 0, 4) + "," + bytes("b", 3, 6) + "}", 6, "b", "its data overlap those of a");
  check_refused("{" + bytes("a", 0, 4) + "," + bytes("b", 0, 4) + "}", 4, "b", "overlap");
  check_refused("{" + bytes("a", 0, 4) + "," + bytes("z", 2, 2) + "}", 4, "z", "its data overlap those of a");
  check_refused("{" + bytes("a", 0, 4) + "}", 5, "a", "1 bytes follow the data of the last tensor");
  check_refused("{}", 5, "", "5 bytes follow the data of the last tensor");
  const format_error problem = refusal(test::file_content("{" + bytes("a", 0, 4) + "}", 5));
  CHECK(problem.offset() == 8 + std::string("{" + bytes("a", 0, 4) + "}").size() + 4);
}

TEST_CASE("safetensors: a file cut at any byte is refused (case 54)", "[safetensors]") {
  const std::string whole = test::file_content(good, 30);
  CHECK(read_content(whole) == 3);
  for (size bytes = 0; bytes < whole.size(); ++bytes) {
    CAPTURE(bytes);
    CHECK_THROWS_AS(read_content(whole.substr(0, bytes)), format_error);
  }
  const test::ScratchFolder folder;
  test::write_file(folder / "short.safetensors", whole.substr(0, whole.size() - 4));
  const auto problem = thrown<format_error>([&] { open_safetensors(folder / "short.safetensors"); });
  CHECK(problem.path() == folder / "short.safetensors");
  CHECK(problem.tensor() == "b.weight");
  CHECK_THROWS_AS(read_content(whole + '\0'), format_error);
}

TEST_CASE("safetensors: any byte changed is refused or harmless", "[safetensors]") {
  const std::string whole = test::file_content(good, 30);
  size accepted = 0, refused = 0;
  for (size at = 0; at < 8 + good.size(); ++at) {
    for (unsigned value = 0; value < 256; ++value) {
      std::string changed = whole;
      if (changed[at] == static_cast<char>(value)) continue;
      changed[at] = static_cast<char>(value);
      try {
        accepted += read_content(changed) == 3;
      } catch (const format_error&) {
        ++refused;
      }
    }
  }
  CAPTURE(accepted, refused);
  CHECK(accepted + refused == 255 * (8 + good.size()));  // nothing else was thrown, no tensor got lost
  CHECK(refused > accepted);
  CHECK(accepted > 500);  // other names, other metadata
}

TEST_CASE("safetensors: deep nesting and long texts", "[safetensors]") {
  const std::string deep(1'000'000, '[');
  check_refused("{\"a\":" + deep + "}", 0, "a", "found an array");
  check_refused("{\"a\":{\"shape\":" + deep + "}", 0, "a", "found an array");
  check_refused("{\"__metadata__\":{\"a\":" + deep + "}", 0, "", "found an array");
  const std::string name(100'000, 'n');
  const format_error problem = refusal(test::file_content("{\"" + name + "\":1}", 0));
  CHECK(std::string(problem.what()).size() < 1000);
  const format_error invalid = refusal(test::file_content("{\"a\":\"" + name + "}", 0));
  CHECK(std::string(invalid.what()).size() < 1000);
  CHECK(refusal(test::file_content("{\"a\\u0000b\\n\":1}", 0)).tensor() == "a\\x00b\\x0a");
}
