// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include <k3/cuda/buffer.cuh>

#include "cuda/graph.cuh"

namespace k3::test {

/// Where a test's tensors lie: every pointer `shift` elements past its buffer's start, `gap` elements between rows.
struct Layout {
  size shift = 0, gap = 0;
};

/// A matrix of T in device memory, given and read as floats. What lies around it is NaN and must stay that.
template <class T>
class DeviceRows {
 public:
  /// NaN everywhere, so that an element that nobody writes is seen.
  DeviceRows(size rows, size columns, Layout layout = {})
      : rows_(rows), columns_(columns), layout_(layout), buffer_(surroundings()) {}
  DeviceRows(size rows, size columns, const std::vector<float>& values, Layout layout = {})
      : rows_(rows), columns_(columns), layout_(layout), buffer_(placed(values)) {}

  /// The values, and NaN around them.
  void set(const std::vector<float>& values) {
    const std::vector<T> all = placed(values);
    buffer_.copy_from(all.data(), 0, all.size());
  }

  DeviceView<T, 2> view() const {
    DeviceView<T, 2> result = device_view(buffer_.data() + layout_.shift, rows_, columns_);
    result.strides[0] = columns_ + layout_.gap;
    return result;
  }
  /// The same memory as a vector; one row only.
  DeviceView<T, 1> row() const { return device_view(buffer_.data() + layout_.shift, columns_); }

  std::vector<float> get() const {
    const std::vector<T> all = buffer_.to_vector();
    std::vector<float> values;
    size next = 0;
    const auto untouched = [&](size to) {
      for (; next < to; ++next)
        if (!std::isnan(static_cast<float>(all[next])))
          throw std::runtime_error("DeviceRows: written outside the matrix");
    };
    for (size r = 0; r < rows_; ++r) {
      untouched(at(r));
      for (size c = 0; c < columns_; ++c) values.push_back(static_cast<float>(all[next++]));
    }
    untouched(all.size());
    return values;
  }

 private:
  std::vector<T> surroundings() const {
    return std::vector<T>(layout_.shift + rows_ * (columns_ + layout_.gap) + 8,
                          T(std::numeric_limits<float>::quiet_NaN()));
  }
  std::vector<T> placed(const std::vector<float>& values) const {
    if (values.size() != rows_ * columns_) throw std::runtime_error("DeviceRows: wrong number of values");
    std::vector<T> all = surroundings();
    for (size r = 0; r < rows_; ++r)
      for (size c = 0; c < columns_; ++c) all[at(r) + c] = T(values[r * columns_ + c]);
    return all;
  }
  size at(size row) const { return layout_.shift + row * (columns_ + layout_.gap); }

  size rows_, columns_;
  Layout layout_;
  DeviceBuffer<T> buffer_;
};

/// work(stream) once on a stream of its own or, with `replays`, captured and replayed that often with `before` in front
/// of each.
template <class Work, class Before>
void run_on_stream(int replays, Work&& work, Before&& before) {
  const Stream stream;
  if (replays == 0)
    work(gpu{stream});
  else
    replay(stream, replays, [&] { work(gpu{stream}); }, before);
  stream.wait();
}

}  // namespace k3::test
