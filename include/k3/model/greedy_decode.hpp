// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/model/decoder.hpp>

namespace k3 {

/// Why a decode ended.
enum class StopReason : unsigned char { max_new, eos };

inline const char* text(StopReason reason) { return reason == StopReason::eos ? "eos" : "max_new"; }

/// What greedy_decode may be asked for.
struct GreedyOptions {
  size max_new = 0;
  /// Any of these ends the text, and is then the last of the new tokens. No other does: a checkpoint's own are
  /// model.config.eos_token_ids, and its tokenizer's special_id("[EOS]").
  std::vector<id> eos{};
  bool keep_logits = false;  ///< return the row that each new token was chosen from
};

/// The new tokens (the prompt is not among them) and why there are no more.
template <class Logit>
struct GreedyResult {
  std::vector<id> tokens;
  StopReason stop = StopReason::max_new;
  std::vector<std::vector<Logit>> logits;  // [new tokens][vocab] with keep_logits
};

/// Called with each new token as soon as it is chosen.
struct NoTokenCallback {
  void operator()(id) const {}
};

namespace detail {

inline void check_prompt(HostView<const id, 1> prompt, size vocab, size position, size capacity, size max_new) {
  constexpr const char* operation = "greedy_decode";
  require(prompt.extent(0) > 0, operation, "prompt", "empty", "at least one token");
  require_shape(operation, "prompt", prompt, prompt.extent(0));
  for (size i = 0; i < prompt.extent(0); ++i)
    if (prompt(i) < 0 || static_cast<size>(prompt(i)) >= vocab)
      throw invalid_argument(operation, "prompt[" + std::to_string(i) + "]", std::to_string(prompt(i)),
                             "an id below the vocabulary size, " + std::to_string(vocab));
  const size room = capacity - position;
  require(
      prompt.extent(0) <= room && max_new <= room - prompt.extent(0), operation, "prompt + max_new",
      [&] { return std::to_string(prompt.extent(0)) + " + " + std::to_string(max_new) + " tokens"; },
      [&] { return "at most the " + std::to_string(room) + " positions left in the cache"; });
}

}  // namespace detail

/// Decoder, or DeviceDecoder of the CUDA backend: what greedy decoding asks of either.
template <class D>
concept any_decoder = requires(D& decoder) {
  typename D::Accumulator;
  { decoder.model() } -> std::convertible_to<const K3CpuModel&>;
  { decoder.max_rows() } -> std::convertible_to<size>;
  { decoder.argmax(size{0}) } -> std::convertible_to<id>;
  decoder.logits_row(size{0});
};

/// Feeds a prompt to the sequence in `slot`, max_rows tokens a pass, and leaves the logits of its last token in the
/// decoder. Same bits as token by token. The prompt must not be empty and must fit the cache: invalid_argument, nothing
/// changed.
template <any_decoder AnyDecoder, class Cache>
void prefill(AnyDecoder& decoder, Cache& cache, size slot, HostView<const id, 1> prompt) {
  const size count = prompt.extent(0), first = cache.position(slot);
  detail::check_prompt(prompt, size{decoder.model().config.vocab_size}, first, cache.capacity(), 0);
  const std::vector<id> slots(decoder.max_rows(), static_cast<id>(slot));
  std::vector<size> positions(decoder.max_rows());
  for (size done = 0; done < count;) {
    const size rows = detail::smaller(decoder.max_rows(), count - done);
    for (size row = 0; row < rows; ++row) positions[row] = first + done + row;
    const size last = rows - 1;
    const bool ends = done + rows == count;
    decoder.forward(cache, {prompt.slice(0, done, rows), view(slots.data(), rows),
                            view(static_cast<const size*>(positions.data()), rows), view(&last, ends ? 1 : 0)});
    done += rows;
  }
}

/// Greedy decoding: the prompt goes into the sequence in `slot`, then the most likely token (ties to the lower id) is
/// appended until `max_new` tokens are there or one of `eos` is chosen. The last token is not fed back; the cache then
/// holds prompt and all new tokens but the last. Throws invalid_argument, with the cache unchanged, for an empty
/// prompt, ids outside the vocabulary and a prompt + max_new beyond the cache's capacity; later for NaN logits, with
/// the sequence marked unusable.
template <any_decoder AnyDecoder, class Cache, class OnToken = NoTokenCallback>
GreedyResult<typename AnyDecoder::Accumulator> greedy_decode(AnyDecoder& decoder, Cache& cache, size slot,
                                                             HostView<const id, 1> prompt, const GreedyOptions& options,
                                                             OnToken&& on_token = {}) {
  detail::check_prompt(prompt, size{decoder.model().config.vocab_size}, cache.position(slot), cache.capacity(),
                       options.max_new);
  GreedyResult<typename AnyDecoder::Accumulator> result;
  if (options.max_new == 0) return result;
  result.tokens.reserve(detail::smaller(options.max_new, size{1} << 16));
  prefill(decoder, cache, slot, prompt);
  const id slot_id = static_cast<id>(slot);
  const size row = 0;
  while (true) {
    const id token = decoder.argmax(0);
    result.tokens.push_back(token);
    if (options.keep_logits) result.logits.push_back(decoder.logits_row(0));
    on_token(token);
    for (const id end : options.eos)
      if (token == end) result.stop = StopReason::eos;
    if (result.stop == StopReason::eos || result.tokens.size() == options.max_new) return result;
    const size position = cache.position(slot);
    decoder.forward(cache, {view(&token, 1), view(&slot_id, 1), view(&position, 1), view(&row, 1)});
  }
}

/// The same in one call, with a decoder and a cache of its own of just the needed size.
template <precision P = Fp32>
GreedyResult<typename P::accumulator> greedy_decode(const host& exec, const K3CpuModel& model,
                                                    const std::vector<id>& prompt, const GreedyOptions& options,
                                                    const Ablation& ablation = {}) {
  detail::check_prompt(view(prompt), model.config.vocab_size, 0, model.config.max_position_embeddings, options.max_new);
  Decoder<P> decoder(exec, model, detail::smaller(size{32}, prompt.size()), 1, ablation);
  HybridCache<P> cache = decoder.make_cache(1, prompt.size() + options.max_new);
  return greedy_decode(decoder, cache, 0, view(prompt), options);
}

}  // namespace k3
