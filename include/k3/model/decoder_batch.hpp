// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/model/hybrid_cache.hpp>

namespace k3 {

/// The tokens of one forward pass: R rows, each with the slot of its sequence. Several rows of a slot are consecutive
/// tokens, beginning at the sequence's position. Rows with `pad_slot` are passed over. `logit_rows` says which rows'
/// logits are wanted, in ascending order; the head is computed for no others.
struct DecoderBatch {
  HostView<const id, 1> tokens;
  HostView<const id, 1> slots;
  HostView<const size, 1> positions;
  HostView<const size, 1> logit_rows;
};

namespace detail {

/// Why the sequence in a slot is not usable; a cache need not know the layer.
template <class Cache>
std::string fault_text(const Cache& cache, size slot) {
  if constexpr (requires { cache.fault_layer(slot); })
    return text(cache.status(slot), cache.fault_layer(slot));
  else
    return text(cache.status(slot));
}

/// Throws invalid_argument, naming row and argument, for a batch that a decoder of these sizes cannot take into
/// `cache`. Texts are made only for a failure: this runs before every token.
template <class Cache>
void check_batch(const DecoderBatch& batch, const Cache& cache, const std::vector<LayerShape>& shapes, size vocab,
                 size max_rows, size max_logit_rows) {
  const size rows = batch.tokens.extent(0);
  require(rows > 0 && rows <= max_rows, "Decoder::forward", "tokens", rows, "1 to max_rows rows");
  require_shape("Decoder::forward", "tokens", batch.tokens, rows);
  require_shape("Decoder::forward", "slots", batch.slots, rows);
  require_shape("Decoder::forward", "positions", batch.positions, rows);
  require(cache.layers() == shapes.size(), "Decoder::forward", "the cache's layers", cache.layers(), shapes.size());
  require(cache.shapes() == shapes, "Decoder::forward", "the cache", "of another geometry", "one that make_cache made");
  const auto fail = [](const char* argument, size row, auto found, const std::string& expected) {
    throw invalid_argument("Decoder::forward", std::string(argument) + "[" + std::to_string(row) + "]",
                           std::to_string(found), expected);
  };
  for (size row = 0; row < rows; ++row) {
    const id slot = batch.slots(row);
    if (slot == pad_slot) continue;
    const id token = batch.tokens(row);
    if (token < 0 || static_cast<size>(token) >= vocab)
      fail("tokens", row, token, "an id below the vocabulary size, " + std::to_string(vocab));
    if (slot < 0 || static_cast<size>(slot) >= cache.slots())
      fail("slots", row, slot, "below " + std::to_string(cache.slots()));
    if (cache.status(static_cast<size>(slot)) != RowStatus::ok)
      throw invalid_argument("Decoder::forward", "the sequence in slot " + std::to_string(slot),
                             fault_text(cache, static_cast<size>(slot)),
                             "one that was reset, restored or rolled back since");
    size expected = cache.position(static_cast<size>(slot));
    for (size earlier = row; earlier-- > 0;) {
      if (batch.slots(earlier) != slot) continue;
      if (earlier + 1 != row) fail("slots", row, slot, "the rows of a sequence one after the other");
      expected = batch.positions(earlier) + 1;
      break;
    }
    if (batch.positions(row) != expected)
      fail("positions", row, batch.positions(row), "the sequence's next position, " + std::to_string(expected));
    if (expected >= cache.capacity())
      fail("positions", row, expected, "below the cache's capacity, " + std::to_string(cache.capacity()));
  }
  const size wanted = batch.logit_rows.extent(0);
  require_shape("Decoder::forward", "logit_rows", batch.logit_rows, wanted);
  require(wanted <= max_logit_rows, "Decoder::forward", "logit_rows", wanted, "at most max_logit_rows");
  for (size i = 0; i < wanted; ++i)
    if (batch.logit_rows(i) >= rows || (i > 0 && batch.logit_rows(i) <= batch.logit_rows(i - 1)))
      fail("logit_rows", i, batch.logit_rows(i), "rows of the batch in ascending order");
}

}  // namespace detail
}  // namespace k3
