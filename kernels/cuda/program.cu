// The first kernel of a recorded step, which reads the inputs. The last one is in fold.cu.

// For each step, the host writes one row of `ring`, in pinned memory, without waiting. `counter`
// counts the steps on the device. The kernel copies the row of this step to `controls`, and all
// kernels of the program read `controls`.
extern "C" __global__ void __launch_bounds__(256)
program_begin(const int* __restrict__ ring, int rows, int words, int* __restrict__ counter,
              int* __restrict__ controls) {
  __shared__ int row;
  if (threadIdx.x == 0) {
    row = counter[0] % rows;
    counter[0] = counter[0] + 1 == rows ? 0 : counter[0] + 1;
    counter[1] = row;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < words; i += blockDim.x)
    controls[i] = ring[(long long)row * words + i];
}
