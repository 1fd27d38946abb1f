// SPDX-License-Identifier: Apache-2.0
// config.json.

#include <k3/io/config.hpp>
#include <k3/io/config_writer.hpp>

#include "fuzz.hpp"

void run_one(std::string_view input) {
  k3::K3Config config;
  try {
    config = k3::config_from_json(k3::json_from_text(input, "config.json"), "config.json");
  } catch (const k3::format_error&) {
    return;
  }
  // What was accepted is a model, and is read back from what the writer makes of it.
  k3::check(config, "config");
  const bool wrapped = config.attn_res_block_size > 0;
  const std::vector<k3::id> ends = std::move(config.eos_token_ids);
  config.eos_token_ids.clear();
  const nlohmann::json written = nlohmann::json::parse(k3::config_to_json(config, {wrapped, false, 0}).dump());
  k3::K3Config again = k3::config_from_json(written, "written");
  require_property(k3::decoder_geometry_from(again) == k3::decoder_geometry_from(config),
                   "geometry survives the writer");
  require_property(again.mixers == config.mixers && again.first_k_dense_replace == config.first_k_dense_replace &&
                       again.tie_word_embeddings == config.tie_word_embeddings,
                   "the layer map survives the writer");
  for (const k3::id token : ends)
    require_property(token >= 0 && static_cast<std::size_t>(token) < config.vocab_size,
                     "an end token is in the vocabulary");
}
