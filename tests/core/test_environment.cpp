// SPDX-License-Identifier: Apache-2.0
#include <k3/core/environment.hpp>

#include <unistd.h>

#include "support/catch.hpp"

using namespace k3;

namespace {

/// A variable's value for as long as the object lives; then what it was before.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    const char* before = std::getenv(name);
    had_ = before != nullptr;
    if (before) before_ = before;
    if (value)
      setenv(name, value, 1);
    else
      unsetenv(name);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() {
    if (had_)
      setenv(name_, before_.c_str(), 1);
    else
      unsetenv(name_);
  }

 private:
  const char* name_;
  bool had_ = false;
  std::string before_;
};

std::string refused(const char* name, const char* value) {
  const Variable variable(name, value);
  try {
    detail::parse_environment();
  } catch (const invalid_argument& e) {
    CHECK(std::string(e.what()).find(name) != std::string::npos);
    return e.argument() + "=" + e.found();
  }
  return "accepted";
}

/// This program again, with these variables, running one hidden test: true where it passes.
bool child_passes(const std::string& variables, const std::string& test) {
  char path[4096] = {};
  if (readlink("/proc/self/exe", path, sizeof path - 1) <= 0) return false;
  return std::system(("env " + variables + " '" + path + "' '" + test + "' >/dev/null 2>&1").c_str()) == 0;
}

}  // namespace

TEST_CASE("environment: defaults", "[environment]") {
  const Variable a("K3_CUDA_KDA", nullptr), b("K3_CUDA_MLA", nullptr), c("K3_ATTNRES_MIX", nullptr),
      d("K3_FORCE_EXPERT", nullptr);
  const Environment e = detail::parse_environment();
  CHECK(e.cuda_kda);
  CHECK(e.cuda_mla);
  CHECK(e.attnres_mix == 1.0f);
  CHECK_FALSE(e.force_expert.has_value());
}

TEST_CASE("environment: each switch is read", "[environment]") {
  {
    const Variable a("K3_CUDA_KDA", "0");
    CHECK_FALSE(detail::parse_environment().cuda_kda);
    CHECK(detail::parse_environment().cuda_mla);
  }
  {
    const Variable a("K3_CUDA_MLA", "0"), b("K3_CUDA_KDA", "1");
    CHECK_FALSE(detail::parse_environment().cuda_mla);
    CHECK(detail::parse_environment().cuda_kda);
  }
  for (const char* mix : {"0", "0.25", "1", "1e-3"}) {
    const Variable a("K3_ATTNRES_MIX", mix);
    CHECK(detail::parse_environment().attnres_mix == std::strtof(mix, nullptr));
  }
  for (const char* expert : {"0", "7", "895"}) {
    const Variable a("K3_FORCE_EXPERT", expert);
    REQUIRE(detail::parse_environment().force_expert.has_value());
    CHECK(*detail::parse_environment().force_expert == std::strtoull(expert, nullptr, 10));
  }
}

TEST_CASE("environment: unknown values are refused by name", "[environment]") {
  for (const char* value : {"", "2", "yes", "off", " 0", "00"}) {
    CHECK(refused("K3_CUDA_KDA", value) == "K3_CUDA_KDA=" + std::string(value));
    CHECK(refused("K3_CUDA_MLA", value) == "K3_CUDA_MLA=" + std::string(value));
  }
  for (const char* value :
       {"", "x", "-0.1", "1.5", "nan", "0.5x", "inf", "0x1p-1", " 0.5", "-0", "+0.5", "1e-400", "1e400", "e1"})
    CHECK(refused("K3_ATTNRES_MIX", value) == "K3_ATTNRES_MIX=" + std::string(value));
  for (const char* value : {"", "-1", "x", "3x", "2147483648", "99999999999999999999", "+1", " 1"})
    CHECK(refused("K3_FORCE_EXPERT", value) == "K3_FORCE_EXPERT=" + std::string(value));
}

TEST_CASE("environment: a process reads it once", "[environment]") {
  const Environment& first = environment();
  const float mix = first.attnres_mix;
  const Variable a("K3_ATTNRES_MIX", mix == 0.5f ? "0.25" : "0.5");
  CHECK(&environment() == &first);
  CHECK(environment().attnres_mix == mix);
}

TEST_CASE("environment child: all off", "[.environment-child]") {
  REQUIRE_FALSE(cuda_kda_enabled());
  REQUIRE_FALSE(cuda_mla_enabled());
  REQUIRE(environment().attnres_mix == 0.0f);
  REQUIRE(environment().force_expert.value_or(99) == 0);
}
TEST_CASE("environment child: only KDA off", "[.environment-child]") {
  REQUIRE_FALSE(cuda_kda_enabled());
  REQUIRE(cuda_mla_enabled());
}
TEST_CASE("environment child: refused", "[.environment-child]") {
  REQUIRE_THROWS_AS(environment(), invalid_argument);
  REQUIRE_THROWS_AS(cuda_kda_enabled(), invalid_argument);  // still refused when asked again
}

TEST_CASE("environment: switches in a process of their own", "[environment]") {
  const std::string unset = "-u K3_CUDA_KDA -u K3_CUDA_MLA -u K3_ATTNRES_MIX -u K3_FORCE_EXPERT ";
  CHECK(child_passes(unset + "K3_CUDA_KDA=0 K3_CUDA_MLA=0 K3_ATTNRES_MIX=0 K3_FORCE_EXPERT=0",
                     "environment child: all off"));
  CHECK_FALSE(child_passes(unset, "environment child: all off"));
  CHECK(child_passes(unset + "K3_CUDA_KDA=0", "environment child: only KDA off"));
  CHECK_FALSE(child_passes(unset, "environment child: only KDA off"));
  CHECK(child_passes(unset + "K3_CUDA_MLA=maybe", "environment child: refused"));
}
