// Padding and cropping of NHWC images, and a fourth channel.

// Writes y (images, P, Q, C) from x (images, H, W, C). Pixel (0, 0) of x becomes pixel (top, left)
// of y, where top and left may be negative. Pixels outside x have the value `outside`.
template <class T>
__device__ __forceinline__ void pad(const T* x, T* y, T outside, int C, int H, int W, int P, int Q,
                                    int top, int left, long long images) {
    EACH_INDEX(i, images * P * Q * C) {
        const long long pixel = i / C, row = pixel / Q;
        const int h = (int)(row % P) - top, w = (int)(pixel % Q) - left;
        const bool inside = h >= 0 && h < H && w >= 0 && w < W;
        y[i] = inside ? x[((row / P * H + h) * W + w) * C + i % C] : outside;
    }
}

extern "C" __global__ void __launch_bounds__(256)
pad2d(const value* __restrict__ x, value* __restrict__ y, float border, int C, int H, int W, int P,
      int Q, int top, int left, long long images) {
    const value outside = put(border);
    if (C % 4 == 0)
        pad(reinterpret_cast<const Stored<4>*>(x), reinterpret_cast<Stored<4>*>(y),
            Stored<4>{{outside, outside, outside, outside}}, C / 4, H, W, P, Q, top, left, images);
    else
        pad(x, y, outside, C, H, W, P, Q, top, left, images);
}

// Writes pixels of 4 channels from pixels of 3 channels. The fourth channel is 0.
extern "C" __global__ void __launch_bounds__(256)
pad_channel(const value* __restrict__ x, value* __restrict__ y, long long pixels) {
    EACH_INDEX(i, pixels) {
        const value* from = x + 3 * i;
        store<4>(y + 4 * i, Floats<4>{{get(from[0]), get(from[1]), get(from[2]), 0.0f}});
    }
}
