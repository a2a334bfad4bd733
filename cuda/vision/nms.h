// Greedy non-maximum suppression of boxes that are sorted by descending score.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/launch.h"

namespace jaxllm {

// A tile of boxes: their bits fill one word.
inline constexpr int kNmsTile = 64;

inline int64_t nms_tiles(int64_t boxes) { return divide_up(boxes, kNmsTile); }

// `boxes` is (groups, count, 4), corners (x1, y1, x2, y2), the highest score first. keep[g, i] is
// true if no kept box j < i has an IoU above `iou_threshold` with box i. With `inclusive` corners a
// side is x2 - x1 + 1. `overlaps` is a workspace of (groups, count, nms_tiles(count)) words; words
// left of the diagonal are not written.
template <typename T>
cudaError_t nms(cudaStream_t stream, const T* boxes, bool* keep, uint64_t* overlaps, int64_t groups,
                int64_t count, float iou_threshold, bool inclusive);

}  // namespace jaxllm
