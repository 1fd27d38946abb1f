// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/buffer.cuh>
#include <k3/cuda/rms_norm.cuh>
#include <k3/kernels/argmax.cuh>
#include <k3/ops/row_status.hpp>

namespace k3 {

/// Device scratch memory of argmax for up to `max_rows` rows. One call at a time may use it.
class DeviceArgmaxWorkspace {
 public:
  DeviceArgmaxWorkspace() = default;
  explicit DeviceArgmaxWorkspace(size max_rows)
      : max_rows_(max_rows),
        keys_(detail::checked_product("DeviceArgmaxWorkspace", "max_rows", max_rows, kernel::argmax_most_blocks),
              false),
        arrived_(max_rows) {}

  size max_rows() const { return max_rows_; }
  size bytes() const { return keys_.bytes() + arrived_.bytes(); }
  unsigned long long* keys() const { return keys_.data(); }
  unsigned* arrived() const { return arrived_.data(); }

 private:
  detail::OwnedSize max_rows_;
  DeviceBuffer<unsigned long long> keys_;
  DeviceBuffer<unsigned> arrived_;
};

/// Greedy choice on the device: ids[r] = index of the largest logit of row r, ties to the lower index.
/// Shapes: logits [R, V] float, ids [R], status [R] if wanted. NaN anywhere in a row: its id is -1 and its status word
/// becomes RowStatus::nan_logits (written, never cleared). Throws invalid_argument on shapes that do not fit, V 0,
/// overlapping memory and a workspace that is too small. Cost: one read of the logits, one launch.
template <device_tensor<2> Logits, writable_device_tensor<1> Ids>
  requires(std::same_as<typename Logits::value_type, float> && std::same_as<typename Ids::value_type, id>)
void argmax(const gpu& exec, const Logits& logits, DeviceArgmaxWorkspace& workspace, const Ids& ids,
            DeviceView<unsigned, 1> status = {}) {
  const size rows = logits.extent(0), count = logits.extent(1);
  detail::require(count > 0 && count < (size{1} << 31), "argmax", "the number of logits", count,
                  "between 1 and 2^31 - 1");
  detail::require_shape("argmax", "logits", logits, rows, count);
  detail::require_shape("argmax", "ids", ids, rows);
  detail::require_disjoint("argmax", "ids", ids, "logits", logits);
  if (status.data != nullptr) {
    detail::require_shape("argmax", "status", status, rows);
    detail::require_disjoint("argmax", "status", status, "logits", logits, "ids", ids);
  }
  detail::require(rows <= workspace.max_rows(), "argmax", "workspace.max_rows", workspace.max_rows(), rows);
  if (rows == 0) return;
  // Maxima are exact in any order, so the split may follow the batch: enough blocks for the device, then longer shares.
  constexpr size busy = 8;  // blocks that a multiprocessor holds
  const size shares = (count + kernel::argmax_share - 1) / kernel::argmax_share;
  const size room = detail::larger<size>(1, static_cast<size>(detail::multiprocessors()) * busy / rows);
  const size most = detail::smaller<size>(room, kernel::argmax_most_blocks), each = (shares + most - 1) / most;
  const size blocks = (shares + each - 1) / each;
  const kernel::ArgmaxArguments a{logits.data,
                                  logits.strides[0],
                                  rows,
                                  static_cast<unsigned>(count),
                                  static_cast<unsigned>(each * kernel::argmax_share),
                                  static_cast<unsigned>(blocks),
                                  static_cast<unsigned>(RowStatus::nan_logits),
                                  detail::rows_aligned(logits),
                                  workspace.keys(),
                                  workspace.arrived(),
                                  ids.data,
                                  status.data};
  detail::launch("argmax", exec.stream, dim3(detail::grid_size(rows * blocks, 1)), dim3(kernel::argmax_threads), 0,
                 kernel::argmax<kernel::argmax_threads>, a);
}

}  // namespace k3
