// Gathers images of a data set, stored as (n, C, H, W), into the values of a mini-batch, stored as
// (image, P, Q, C), i.e. in NHWC layout.

enum { THREADS = 256, EACH = 4 };  // threads per block; elements per thread

__device__ __forceinline__ float usual(unsigned char) { return 255.0f; }  // the default divisor
__device__ __forceinline__ float usual(float) { return 1.0f; }

enum { LEFT_TO_RIGHT = 1, TOP_TO_BOTTOM = 2 };  // the bits of `mirrored`

enum { BYTES, FLOATS, WORDS };  // kinds of data sets: images of bytes or of floats, or targets

// A row of the table: the data set (n, C, H, W); the arrays indices, valid, mirrored, top, left,
// fill, centre and divisor, which may be null; the result; the kind; C, H, W, P, Q, of_pixels; the
// number of images where `valid` is null, that of the result, and the parts of an image.
struct Window {
    const long long* row;

    template <class T> __device__ __forceinline__ T* array(int column) const {
        return reinterpret_cast<T*>(row[column]);
    }
    // Returns the option of an image, or `other` if it is not given.
    __device__ __forceinline__ int said(int column, int image, int other) const {
        return row[column] ? array<const int>(column)[image] : other;
    }
};

// Mirrors each image as `mirrored` says, and cuts out the window (P, Q) that begins at pixel (top,
// left). Pixels outside the image have the value of `fill` (C), or 0. The result is converted(pixel,
// c) or, if of_pixels, converted(pixel, index of (c, p, q)). Image i is number indices[i] of the
// data set, or number i if indices is null. Unused images (from image *valid on) become zero. A
// block of threads gathers a part of an image at a time.
template <class T, class Out, class F>
__device__ __forceinline__ void gather(const Window of, F converted) {
    const int C = of.row[11], H = of.row[12], W = of.row[13], P = of.row[14], Q = of.row[15];
    const int used = of.said(2, 0, of.row[17]), parts = of.row[19], size = P * Q * C;
    const T* fill = of.array<const T>(6);
    for (long long part = blockIdx.x; part < of.row[18] * parts; part += gridDim.x) {
        const int image = part / parts, first = part % parts * (THREADS * EACH) + threadIdx.x;
        const bool is_used = image < used;
        Out* out = of.array<Out>(9) + (long long)image * size;
        const T* own = of.array<const T>(0);
        if (is_used) own += of.said(1, image, image) * ((long long)C * H * W);
        const int turned = is_used ? of.said(3, image, 0) : 0;
        const int down = is_used ? of.said(4, image, 0) : 0;
        const int across = is_used ? of.said(5, image, 0) : 0;
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const int e = first + n * THREADS;
            if (e >= size) break;
            const int c = e % C, q = e / C % Q, p = e / C / Q;
            int h = p + down, w = q + across;
            const bool inside = h >= 0 && h < H && w >= 0 && w < W;
            if (turned & LEFT_TO_RIGHT) w = W - 1 - w;
            if (turned & TOP_TO_BOTTOM) h = H - 1 - h;
            T pixel = fill ? fill[c] : (T)0;
            if (inside && is_used) pixel = own[((long long)c * H + h) * W + w];
            const Out result = converted(pixel, of.row[16] ? (c * P + p) * Q + q : c);
            out[e] = is_used ? result : (Out)0;
        }
    }
}

// (pixel - centre) / divisor, where centre and divisor are given for each channel or for each
// (c, p, q). If centre is null, bytes are divided by 255, and floats are not normalized.
struct Normalized {
    const float *centre, *divisor;

    __device__ __forceinline__ explicit Normalized(const Window& of)
        : centre(of.array<const float>(7)), divisor(of.array<const float>(8)) {}

    template <class T> __device__ __forceinline__ value operator()(T pixel, int at) const {
        return put(((float)pixel - (centre ? centre[at] : 0.0f)) /
                   (centre ? divisor[at] : usual(pixel)));
    }
};

// Windows of normalized images. Targets are words of four bytes, which stay as they are.
extern "C" __global__ void __launch_bounds__(256, 5)
    images_gather(const long long* __restrict__ table) {
    const Window of = {table + 20 * blockIdx.y};
    if (of.row[10] == BYTES) gather<unsigned char, value>(of, Normalized{of});
    if (of.row[10] == FLOATS) gather<float, value>(of, Normalized{of});
    if (of.row[10] == WORDS) gather<int, int>(of, [&](int word, int) { return word; });
}

// y = factor * (x + total) for images (image, height, width, channels), where x is mirrored left to
// right (turn 1), top to bottom (2), both ways (3) or not at all. total may be null.
extern "C" __global__ void __launch_bounds__(256)
    images_mirror(const value* __restrict__ x, const value* __restrict__ total,
                  value* __restrict__ y, float factor, int turn, int channels, int height,
                  int width, long long n) {
    EACH_INDEX(i, n) {
        const long long pixel = i / channels, row = pixel / width;
        int w = (int)(pixel % width), h = (int)(row % height);
        if (turn & LEFT_TO_RIGHT) w = width - 1 - w;
        if (turn & TOP_TO_BOTTOM) h = height - 1 - h;
        const long long from = ((row / height * height + h) * width + w) * channels + i % channels;
        y[i] = put((get(x[from]) + (total ? get(total[i]) : 0.0f)) * factor);
    }
}
