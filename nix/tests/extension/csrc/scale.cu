// The smallest source with what a real one has: a kernel and its launch, CUDA's headers and one of torch's.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <torch/headeronly/macros/Macros.h>

__global__ void scale(__nv_bfloat16 *values, float factor, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) {
    values[i] = __float2bfloat16(__bfloat162float(values[i]) * factor);
  }
}

C10_API void scale_all(__nv_bfloat16 *values, float factor, int count, cudaStream_t stream) {
  scale<<<(count + 255) / 256, 256, 0, stream>>>(values, factor, count);
}
