// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <vector>

#include <k3/core/any_view.hpp>
#include <k3/core/precision.hpp>
#include <k3/geometry/k3_graph.hpp>

namespace k3 {

/// One layer's part of a sequence: a KDA layer's state and convolution window, or an MLA layer's latent rows.
template <precision P>
struct LayerSnapshot {
  MixerKind mixer = MixerKind::Kda;
  std::vector<typename P::state> recurrent;     // [H, D key, D value]
  std::vector<typename P::activation> conv;     // [3*H*D, kernel-1]
  std::vector<typename P::activation> latents;  // [position, kv_lora+rope]
};

/// All that a decoder knows of one sequence after `position` tokens, apart from any cache: keep it, restore it into a
/// slot, into several, or write it to a file. Two snapshots of the same tokens are equal byte for byte.
template <precision P>
struct CacheSnapshot {
  size position = 0;
  std::vector<LayerSnapshot<P>> layers;

  /// The snapshot as bytes, little-endian: "K3CACHE\0", version, the element types of state, window and latents,
  /// position, number of layers; per layer a tag (1 KDA, 2 MLA), 64-bit counts and the elements. No padding, no limit.
  std::vector<unsigned char> to_bytes() const;

  /// Reads to_bytes' form. Throws format_error, with the byte offset, for anything else: other magic, version or
  /// element types, an unknown tag, counts that the bytes do not hold, bytes left over. Allocates what they hold.
  static CacheSnapshot from_bytes(const unsigned char* bytes, size count);
};

/// A point of a sequence to which its cache can be set back: the KDA states as they were. The MLA latents stay in the
/// cache, since later tokens only append; so a point serves only the slot and the sequence it was taken from, as long
/// as its tokens are there: `generation` names them.
template <precision P>
struct RollbackPoint {
  size slot = 0, position = 0, generation = 0;
  std::vector<LayerSnapshot<P>> kda_layers;
};

namespace detail {

/// What one layer of a cache keeps of a sequence, in elements: a KDA layer's state and window, or the width of an MLA
/// row and how much of it is the latent.
struct LayerShape {
  MixerKind mixer = MixerKind::Kda;
  size recurrent = 0, conv = 0, width = 0, latent = 0;

  friend bool operator==(const LayerShape&, const LayerShape&) = default;
};

inline std::vector<LayerShape> layer_shapes(const K3Graph& graph, const KdaConfig& kda, const MlaConfig& mla) {
  std::vector<LayerShape> shapes;
  for (const K3LayerSpec& layer : graph.layers) {
    const bool is_kda = layer.mixer == MixerKind::Kda;
    shapes.push_back(is_kda ? LayerShape{layer.mixer, kda_state_elements(kda), kda_conv_elements(kda), 0, 0}
                            : LayerShape{layer.mixer, 0, 0, mla_cache_width(mla), mla.kv_lora_rank});
  }
  return shapes;
}

/// Throws invalid_argument unless `layer` is what a layer of this shape keeps of `position` tokens.
template <precision P>
void check_layer(const char* operation, size index, const LayerShape& shape, size position,
                 const LayerSnapshot<P>& layer) {
  const auto fail = [&](const char* part, const std::string& found, const std::string& expected) {
    throw invalid_argument(operation, "layer " + std::to_string(index) + part, found, expected);
  };
  const auto require_count = [&](const char* part, size found, size expected) {
    if (found != expected) fail(part, std::to_string(found) + " elements", std::to_string(expected));
  };
  if (layer.mixer != shape.mixer) fail("", layer.mixer == MixerKind::Kda ? "KDA" : "MLA", "the other kind");
  require_count(" recurrent", layer.recurrent.size(), shape.recurrent);
  require_count(" conv", layer.conv.size(), shape.conv);
  require_count(" latents", layer.latents.size(), position * shape.width);
}

/// Throws invalid_argument unless `snapshot` fits a cache of these layers and this capacity.
template <precision P>
void check_snapshot(const char* operation, const std::vector<LayerShape>& shapes, size capacity,
                    const CacheSnapshot<P>& snapshot) {
  require(snapshot.layers.size() == shapes.size(), operation, "the snapshot's layers", snapshot.layers.size(),
          shapes.size());
  require(snapshot.position <= capacity, operation, "the snapshot's position", snapshot.position,
          [&] { return "at most the capacity, " + std::to_string(capacity); });
  for (size index = 0; index < shapes.size(); ++index)
    check_layer(operation, index, shapes[index], snapshot.position, snapshot.layers[index]);
}

/// Throws invalid_argument unless `point` holds what the KDA layers of a cache of these layers keep.
template <precision P>
void check_point(const char* operation, const std::vector<LayerShape>& shapes, const RollbackPoint<P>& point) {
  size kda_layers = 0, next = 0;
  for (const LayerShape& shape : shapes) kda_layers += shape.mixer == MixerKind::Kda;
  require(point.kda_layers.size() == kda_layers, operation, "the point's KDA layers", point.kda_layers.size(),
          kda_layers);
  for (size index = 0; index < shapes.size(); ++index)
    if (shapes[index].mixer == MixerKind::Kda)
      check_layer(operation, index, shapes[index], point.position, point.kda_layers[next++]);
}

static_assert(std::endian::native == std::endian::little, "cache bytes are written as they lie in memory");

inline constexpr char cache_magic[8] = {'K', '3', 'C', 'A', 'C', 'H', 'E', '\0'};
inline constexpr std::uint32_t cache_version = 1;

template <precision P>
constexpr std::uint32_t cache_types() {
  using Any = AnyVector<>;
  return static_cast<std::uint32_t>(Any::element_type<typename P::state>()) |
         static_cast<std::uint32_t>(Any::element_type<typename P::activation>()) << 8 |
         static_cast<std::uint32_t>(Any::element_type<typename P::activation>()) << 16;
}

class ByteWriter {
 public:
  template <class T>
  void value(T v) {
    raw(&v, sizeof(T));
  }
  template <class T>
  void elements(const std::vector<T>& values) {
    value(static_cast<std::uint64_t>(values.size()));
    raw(values.data(), values.size() * sizeof(T));
  }
  void raw(const void* data, size count) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    result.insert(result.end(), bytes, bytes + count);
  }

  std::vector<unsigned char> result;
};

class ByteReader {
 public:
  ByteReader(const unsigned char* bytes, size count) : bytes_(bytes), count_(count) {}

  [[noreturn]] void fail(const std::string& part, const std::string& what) const {
    throw format_error("cache bytes", part, what, at_);
  }
  template <class T>
  T value(const std::string& part) {
    if (count_ - at_ < sizeof(T)) fail(part, "the bytes end here");
    T v;
    __builtin_memcpy(&v, bytes_ + at_, sizeof(T));
    at_ += sizeof(T);
    return v;
  }
  template <class T>
  void elements(const std::string& part, std::vector<T>& values) {
    const auto wanted = value<std::uint64_t>(part);
    if (wanted > (count_ - at_) / sizeof(T))
      fail(part, "wants " + std::to_string(wanted) + " elements, " + std::to_string(count_ - at_) + " bytes are left");
    values.resize(static_cast<size>(wanted));
    if (wanted > 0) __builtin_memcpy(static_cast<void*>(values.data()), bytes_ + at_, values.size() * sizeof(T));
    at_ += values.size() * sizeof(T);
  }
  bool at_end() const { return at_ == count_; }

 private:
  const unsigned char* bytes_;
  size count_;
  size at_ = 0;
};

}  // namespace detail

template <precision P>
std::vector<unsigned char> CacheSnapshot<P>::to_bytes() const {
  detail::ByteWriter out;
  out.raw(detail::cache_magic, sizeof detail::cache_magic);
  out.value(detail::cache_version);
  out.value(detail::cache_types<P>());
  out.value(static_cast<std::uint64_t>(position));
  out.value(static_cast<std::uint64_t>(layers.size()));
  for (const LayerSnapshot<P>& layer : layers) {
    out.value(static_cast<unsigned char>(layer.mixer == MixerKind::Kda ? 1 : 2));
    if (layer.mixer == MixerKind::Kda) {
      out.elements(layer.conv);
      out.elements(layer.recurrent);
    } else {
      out.elements(layer.latents);
    }
  }
  return std::move(out.result);
}

template <precision P>
CacheSnapshot<P> CacheSnapshot<P>::from_bytes(const unsigned char* bytes, size count) {
  detail::ByteReader in(bytes, count);
  for (const char expected : detail::cache_magic)
    if (in.value<char>("header") != expected) in.fail("header", "does not begin with K3CACHE");
  const auto version = in.value<std::uint32_t>("header");
  if (version != detail::cache_version) in.fail("header", "version " + std::to_string(version) + ", expected 1");
  if (in.value<std::uint32_t>("header") != detail::cache_types<P>())
    in.fail("header", std::string("element types of another precision, expected ") + P::name);
  CacheSnapshot snapshot;
  snapshot.position = static_cast<size>(in.value<std::uint64_t>("header"));
  const auto layers = in.value<std::uint64_t>("header");
  for (std::uint64_t index = 0; index < layers; ++index) {
    const std::string part = "layer " + std::to_string(index);
    const auto tag = in.value<unsigned char>(part);
    if (tag != 1 && tag != 2) in.fail(part, "unknown tag " + std::to_string(tag));
    LayerSnapshot<P> layer;
    layer.mixer = tag == 1 ? MixerKind::Kda : MixerKind::Mla;
    if (tag == 1) {
      in.elements(part + " conv", layer.conv);
      in.elements(part + " recurrent", layer.recurrent);
    } else {
      in.elements(part + " latents", layer.latents);
    }
    snapshot.layers.push_back(std::move(layer));
  }
  if (!in.at_end()) in.fail("end", "bytes are left over");
  return snapshot;
}

}  // namespace k3
