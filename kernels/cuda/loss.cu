// Softmax, cross-entropy and errors in double precision: the reported losses, and the gradients
// that start the backward pass.
//
// logits are stored as (rows, classes), where a row is an image or, in segmentation, a pixel. A
// block of threads processes 16 rows at once, one per warp. A lane adds up every 32nd class, and a
// tree adds up the lanes. Kernels for errors process one element per thread.

enum { ROWS = 16, LANES_OF_WARP = 32 };

// Returns the rows or elements of leaf blockIdx.x of a sum over images, without unused images. An
// image has `size` rows or elements. A leaf consists of `images` whole images, or of one of the
// `parts` of an image, and has at most `chunk` rows or elements.
struct Range {
    long long first, stop;
};

__device__ __forceinline__ Range leaf(const int* valid, int size, int images, int parts,
                                      int chunk) {
    const long long image = (long long)(blockIdx.x / parts) * images;
    const long long first = image * size + (long long)(blockIdx.x % parts) * chunk;
    const long long stop = min((image + images) * size, (long long)*valid * size);
    return {first, min(first + chunk, stop)};
}

// Adds up `value` over the warps of the block, in order, and stores the sum in rows[blockIdx.x].
__device__ __forceinline__ void add_warps(double* of_warp, double value, double* rows) {
    if (threadIdx.x % LANES_OF_WARP == 0) of_warp[threadIdx.x / LANES_OF_WARP] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0.0;
        for (int i = 0; i < (int)blockDim.x / LANES_OF_WARP; i++) sum += of_warp[i];
        rows[blockIdx.x] = sum;
    }
}

// Returns the sum of `value` over a warp's lanes, in each lane.
__device__ __forceinline__ double sum_of_warp(double value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value += shfl_xor(value, mask);
    return value;
}

// The largest logit of a row (`top`), and the sum of e^(logit - top) over the classes.
struct Normalizer {
    double top, sum;
};

__device__ __forceinline__ Normalizer normalizer(const float* logits, int classes) {
    const int lane = threadIdx.x % LANES_OF_WARP;
    float top = logits[0];
    for (int c = lane; c < classes; c += LANES_OF_WARP) top = logits[c] > top ? logits[c] : top;
    for (int mask = 16; mask; mask /= 2) {
        const float other = shfl_xor(top, mask);
        top = other > top ? other : top;
    }
    Normalizer found = {top, 0.0};
#pragma unroll 1
    for (int c = lane; c < classes; c += LANES_OF_WARP) found.sum += exp(logits[c] - found.top);
    found.sum = sum_of_warp(found.sum);
    return found;
}

// The first row of this thread's warp, as a number in the block and as a number over all blocks.
__device__ __forceinline__ int row_of_block() { return threadIdx.x / LANES_OF_WARP; }
__device__ __forceinline__ long long row_of_all() {
    return (long long)blockIdx.x * ROWS + row_of_block();
}

// p (rows, classes) = e^logit / S, where S is the sum of e^logit over the classes.
extern "C" __global__ void __launch_bounds__(512)
    loss_softmax(const float* __restrict__ logits, double* __restrict__ p, int classes) {
    const long long first = row_of_all() * classes;
    const Normalizer of = normalizer(logits + first, classes);
    for (int c = threadIdx.x % LANES_OF_WARP; c < classes; c += LANES_OF_WARP)
        p[first + c] = exp(logits[first + c] - of.top) / of.sum;
}

// The gradient of softmax: dx (rows, classes) = p (dy - S), where S is the sum of p dy over the
// classes.
extern "C" __global__ void __launch_bounds__(512)
    loss_softmax_dx(const float* __restrict__ dy, const double* __restrict__ p,
                    float* __restrict__ dx, int classes) {
    const long long first = row_of_all() * classes;
    const int lane = threadIdx.x % LANES_OF_WARP;
    double inner = 0.0;
    for (int c = lane; c < classes; c += LANES_OF_WARP) inner += p[first + c] * dy[first + c];
    inner = sum_of_warp(inner);
    for (int c = lane; c < classes; c += LANES_OF_WARP)
        dx[first + c] = (float)(p[first + c] * (dy[first + c] - inner));
}

// Labels outside 0..K-1 are not classes, and the losses ignore them.
__device__ __forceinline__ bool is_class(int label, int classes) {
    return label >= 0 && label < classes;
}

__device__ __forceinline__ double weight_of(const double* weights, int label) {
    return weights ? weights[label] : 1.0;
}

// rows (leaves): for each leaf, the sum of the terms of LabelRule in
// mpidl/backends/training_interface.py. valid: the number of images in this rank's share. weights:
// the class weights, or null.
extern "C" __global__ void __launch_bounds__(512)
    loss_cross_entropy(const float* __restrict__ logits, const int* __restrict__ labels,
                       const int* __restrict__ valid, double* __restrict__ rows,
                       const double* __restrict__ weights, double smoothing, double gamma,
                       int classes, int pixels, int images, int parts, int chunk) {
    __shared__ double of_warp[ROWS];
    const Range own = leaf(valid, pixels, images, parts, chunk);
    double value = 0.0;
    for (long long row = own.first + row_of_block(); row < own.stop; row += ROWS) {
        if (!is_class(labels[row], classes)) continue;
        const float* scores = logits + row * classes;
        const Normalizer of = normalizer(scores, classes);
        double loss = log(of.sum) - (scores[labels[row]] - of.top);
        if (gamma > 0.0) loss *= pow(1.0 - exp(-loss), gamma);
        value += (1.0 - smoothing) * weight_of(weights, labels[row]) * loss;
        if (smoothing > 0.0) {
            double smooth = 0.0;
#pragma unroll 1
            for (int c = threadIdx.x % LANES_OF_WARP; c < classes; c += LANES_OF_WARP)
                smooth += weight_of(weights, c) * (scores[c] - of.top - log(of.sum));
            value -= smoothing / classes * sum_of_warp(smooth);
        }
    }
    add_warps(of_warp, value, rows);
}

// d (rows, classes): the gradient of the terms of LabelRule, times factor * late. d is 0 for unused
// images. late: a number that becomes known only when the kernel runs, or null.
extern "C" __global__ void __launch_bounds__(512)
    loss_dlogits(const float* __restrict__ logits, const int* __restrict__ labels,
                 const int* __restrict__ valid, double factor, const double* __restrict__ late,
                 float* __restrict__ d, const double* __restrict__ weights, double smoothing,
                 double gamma, int classes, int pixels) {
    const long long row = row_of_all();
    const int lane = threadIdx.x % LANES_OF_WARP;
    const float* own = logits + row * classes;
    d += row * classes;
    const int label = row < (long long)*valid * pixels ? labels[row] : -1;
    if (!is_class(label, classes)) {
        for (int c = lane; c < classes; c += LANES_OF_WARP) d[c] = 0.0f;
        return;
    }
    const double scale = late ? *late * factor : factor;
    const Normalizer of = normalizer(own, classes);
    double pull = (1.0 - smoothing) * weight_of(weights, label);
    if (gamma > 0.0) {
        const double z = own[label] - of.top, p = exp(z) / of.sum, rest = 1.0 - p;
        const double power = pow(rest, gamma);
        pull *= rest > 0.0 ? power - gamma * p * power / rest * (z - log(of.sum)) : 0.0;
    }
    double all_weights = 0.0;
    if (smoothing > 0.0) {
#pragma unroll 1
        for (int c = lane; c < classes; c += LANES_OF_WARP) all_weights += weight_of(weights, c);
        all_weights = sum_of_warp(all_weights);
    }
    const double share = smoothing / classes, push = pull + share * all_weights;
    for (int c = lane; c < classes; c += LANES_OF_WARP) {
        const double p = exp(own[c] - of.top) / of.sum;
        const double slope = push * p - (label == c ? pull : 0.0);
        d[c] = (float)((slope - share * weight_of(weights, c)) * scale);
    }
}

// rows (leaves): for each leaf, the sum of the class weights of its labels.
extern "C" __global__ void __launch_bounds__(512)
    loss_label_weight(const int* __restrict__ labels, const int* __restrict__ valid,
                      double* __restrict__ rows, const double* __restrict__ weights, int classes,
                      int pixels, int images, int parts, int chunk) {
    __shared__ double of_warp[ROWS];
    const Range own = leaf(valid, pixels, images, parts, chunk);
    double value = 0.0;
    for (long long row = own.first + threadIdx.x; row < own.stop; row += blockDim.x)
        if (is_class(labels[row], classes)) value += weight_of(weights, labels[row]);
    add_warps(of_warp, sum_of_warp(value), rows);
}

// inverse (1) = 1 / total, or 0 if total (1) is 0.
extern "C" __global__ void loss_reciprocal(const double* __restrict__ total,
                                           double* __restrict__ inverse) {
    if (threadIdx.x == 0) *inverse = *total == 0.0 ? 0.0 : 1.0 / *total;
}

// Returns whether (value, place) beats (best, at) in the search for the largest value. NaN beats
// numbers, and the first of equal values beats the others.
__device__ __forceinline__ bool before(float value, int place, float best, int at) {
    const bool strange = value != value, best_strange = best != best;
    if (strange != best_strange) return strange;
    if (value > best) return true;
    return (strange || value == best) && place < at;
}

// Returns the class with the largest logit of a row, in each lane of a warp.
__device__ __forceinline__ int prediction(const float* scores, int classes) {
    float best = scores[0];
    int at = 0;
    for (int c = threadIdx.x % LANES_OF_WARP; c < classes; c += LANES_OF_WARP)
        if (before(scores[c], c, best, at)) best = scores[c], at = c;
    for (int mask = 16; mask; mask /= 2) {
        const float other = shfl_xor(best, mask);
        const int place = shfl_xor(at, mask);
        if (before(other, place, best, at)) best = other, at = place;
    }
    return at;
}

// rows (leaves): for each leaf, the number of rows whose largest logit belongs to the row's label,
// or NaN if the logits of a row with a label include NaN.
extern "C" __global__ void __launch_bounds__(512)
    loss_correct(const float* __restrict__ logits, const int* __restrict__ labels,
                 const int* __restrict__ valid, double* __restrict__ rows, int classes, int pixels,
                 int images, int parts, int chunk) {
    __shared__ double of_warp[ROWS];
    const Range own = leaf(valid, pixels, images, parts, chunk);
    double value = 0.0;
    for (long long row = own.first + row_of_block(); row < own.stop; row += ROWS) {
        if (!is_class(labels[row], classes)) continue;
        const int c = prediction(logits + row * classes, classes);
        const float largest = logits[row * classes + c];
        value += largest != largest ? largest : (double)(c == labels[row]);
    }
    add_warps(of_warp, value, rows);
}

// Returns the index in a target of element i of y. In memory, element k of an image of y
// corresponds to element k % near * far + k / near of the target, which is k if `near` is
// `elements`.
__device__ __forceinline__ long long in_target(long long i, int elements, int near, int far) {
    if (near == elements) return i;
    const long long image = i / elements * elements;
    const int k = (int)(i - image);
    return image + k % near * far + k / near;
}

__device__ __forceinline__ double error(const float* y, const float* target, long long i,
                                        int elements, int near, int far) {
    return (double)y[i] - target[in_target(i, elements, near, far)];
}

// rows (leaves): for each leaf, the sum of |y - target|, or of (y - target)^2 if power is 2.
extern "C" __global__ void __launch_bounds__(256)
    loss_errors(const float* __restrict__ y, const float* __restrict__ target,
                const int* __restrict__ valid, double* __restrict__ rows, int near, int far,
                int power, int elements, int images, int parts, int chunk) {
    __shared__ double of_warp[256 / LANES_OF_WARP];
    const Range own = leaf(valid, elements, images, parts, chunk);
    double value = 0.0;
    for (long long i = own.first + threadIdx.x; i < own.stop; i += blockDim.x) {
        const double e = error(y, target, i, elements, near, far);
        value += power == 2 ? e * e : fabs(e);
    }
    add_warps(of_warp, sum_of_warp(value), rows);
}

// dy = e * factor * late, where e is y - target, or the sign of y - target if power is 1. dy is 0
// for unused images.
extern "C" __global__ void __launch_bounds__(256)
    loss_errors_dy(const float* __restrict__ y, const float* __restrict__ target,
                   const int* __restrict__ valid, double factor, const double* __restrict__ late,
                   float* __restrict__ dy, int near, int far, int power, int elements,
                   long long n) {
    const double scale = late ? *late * factor : factor;
    const long long used = (long long)*valid * elements;
    EACH_INDEX(i, n) {
        double e = 0.0;
        if (i < used) e = error(y, target, i, elements, near, far);
        if (power == 1) e = e > 0.0 ? 1.0 : e < 0.0 ? -1.0 : e;  // NaN stays NaN
        dy[i] = i < used ? (float)(e * scale) : 0.0f;
    }
}

// Returns the target probability of class c of a row, after label smoothing.
__device__ __forceinline__ double smoothed(const float* targets, long long row, int c,
                                           double smoothing, int classes, int pixels, int near,
                                           int far) {
    const long long at = in_target(row * classes + c, classes * pixels, near, far);
    return (1.0 - smoothing) * targets[at] + smoothing / classes;
}

// rows (leaves): for each leaf, the sum of -q log p over its rows and the classes. q: the targets
// after label smoothing.
extern "C" __global__ void __launch_bounds__(512)
    loss_soft(const float* __restrict__ logits, const float* __restrict__ targets,
              const int* __restrict__ valid, double* __restrict__ rows, int near, int far,
              double smoothing, int classes, int pixels, int images, int parts, int chunk) {
    __shared__ double of_warp[ROWS];
    const Range own = leaf(valid, pixels, images, parts, chunk);
    double value = 0.0;
    for (long long row = own.first + row_of_block(); row < own.stop; row += ROWS) {
        const float* scores = logits + row * classes;
        const Normalizer of = normalizer(scores, classes);
        const double log_sum = log(of.sum);
        double loss = 0.0;
        for (int c = threadIdx.x % LANES_OF_WARP; c < classes; c += LANES_OF_WARP)
            loss += smoothed(targets, row, c, smoothing, classes, pixels, near, far) *
                    (log_sum - (scores[c] - of.top));
        value += sum_of_warp(loss);
    }
    add_warps(of_warp, value, rows);
}

// d (rows, classes): the gradient of the terms of loss_soft, times factor * late. d is 0 for unused
// images.
extern "C" __global__ void __launch_bounds__(512)
    loss_soft_dlogits(const float* __restrict__ logits, const float* __restrict__ targets,
                      const int* __restrict__ valid, double factor,
                      const double* __restrict__ late, float* __restrict__ d, int near, int far,
                      double smoothing, int classes, int pixels) {
    const long long row = row_of_all();
    const int lane = threadIdx.x % LANES_OF_WARP;
    const float* own = logits + row * classes;
    d += row * classes;
    if (row >= (long long)*valid * pixels) {
        for (int c = lane; c < classes; c += LANES_OF_WARP) d[c] = 0.0f;
        return;
    }
    const double scale = late ? *late * factor : factor;
    const Normalizer of = normalizer(own, classes);
    double all_targets = 0.0;
#pragma unroll 1  // here and below, full unrolling would spill registers
    for (int c = lane; c < classes; c += LANES_OF_WARP)
        all_targets += smoothed(targets, row, c, smoothing, classes, pixels, near, far);
    all_targets = sum_of_warp(all_targets);
#pragma unroll 1
    for (int c = lane; c < classes; c += LANES_OF_WARP) {
        const double p = exp(own[c] - of.top) / of.sum;
        const double q = smoothed(targets, row, c, smoothing, classes, pixels, near, far);
        d[c] = (float)((p * all_targets - q) * scale);
    }
}

// rows (leaves): for each leaf, the sum of the targets of the classes with the largest logits, or
// NaN if a logit is NaN.
extern "C" __global__ void __launch_bounds__(512)
    loss_soft_correct(const float* __restrict__ logits, const float* __restrict__ targets,
                      const int* __restrict__ valid, double* __restrict__ rows, int near, int far,
                      int classes, int pixels, int images, int parts, int chunk) {
    __shared__ double of_warp[ROWS];
    const Range own = leaf(valid, pixels, images, parts, chunk);
    double value = 0.0;
    for (long long row = own.first + row_of_block(); row < own.stop; row += ROWS) {
        const int c = prediction(logits + row * classes, classes);
        const float largest = logits[row * classes + c];
        value += largest != largest
                     ? largest
                     : targets[in_target(row * classes + c, classes * pixels, near, far)];
    }
    add_warps(of_warp, value, rows);
}

// The factors of -log p and -log q of an element; see BinaryRule in
// mpidl/backends/training_interface.py. Labels other than 0 and 1 have factors of zero.
struct BinaryWeights {
    double positive, negative;
};

__device__ __forceinline__ BinaryWeights binary_weights(const float* targets, const int* labels,
                                                        long long i, double weight) {
    if (!labels) return {weight * targets[i], 1.0 - targets[i]};
    return {labels[i] == 1 ? weight : 0.0, labels[i] == 0 ? 1.0 : 0.0};
}

// p = 1 / (1 + e^-x), q = 1 - p, and their negative logarithms.
struct Chances {
    double p, q, minus_log_p, minus_log_q;
};

__device__ __forceinline__ Chances chances(double x) {
    const double e = exp(-fabs(x)), larger = 1.0 / (1.0 + e), smaller = e / (1.0 + e);
    const double log = log1p(e);
    return {x >= 0.0 ? larger : smaller, x >= 0.0 ? smaller : larger, log + (x < 0.0 ? -x : 0.0),
            log + (x > 0.0 ? x : 0.0)};
}

// rows (leaves): for each leaf, the sum of the terms of BinaryRule. targets, labels: the targets as
// floats or as ints; the other pointer is null. positive_weights: one weight per class, or null. In
// memory, elements of an image with consecutive numbers have consecutive classes.
extern "C" __global__ void __launch_bounds__(256)
    loss_binary(const float* __restrict__ logits, const float* __restrict__ targets,
                const int* __restrict__ labels, const int* __restrict__ valid,
                double* __restrict__ rows, const double* __restrict__ positive_weights,
                double gamma, int classes, int near, int far, int elements, int images, int parts,
                int chunk) {
    __shared__ double of_warp[256 / LANES_OF_WARP];
    const Range own = leaf(valid, elements, images, parts, chunk);
    double value = 0.0;
    for (long long i = own.first + threadIdx.x; i < own.stop; i += blockDim.x) {
        const BinaryWeights w =
            binary_weights(targets, labels, in_target(i, elements, near, far),
                           weight_of(positive_weights, (int)(i % classes)));
        const Chances c = chances(logits[i]);
        double up = c.minus_log_q, down = c.minus_log_p;
        if (gamma > 0.0) up *= pow(c.p, gamma), down *= pow(c.q, gamma);
        value += w.positive * down + w.negative * up;
    }
    add_warps(of_warp, sum_of_warp(value), rows);
}

// d: the gradient of the terms of BinaryRule, times factor * late. d is 0 for unused images.
extern "C" __global__ void __launch_bounds__(256)
    loss_binary_dlogits(const float* __restrict__ logits, const float* __restrict__ targets,
                        const int* __restrict__ labels, const int* __restrict__ valid,
                        double factor, const double* __restrict__ late, float* __restrict__ d,
                        const double* __restrict__ positive_weights, double gamma, int classes,
                        int near, int far, int elements, long long n) {
    const double scale = late ? *late * factor : factor;
    const long long used = (long long)*valid * elements;
    EACH_INDEX(i, n) {
        if (i >= used) {
            d[i] = 0.0f;
            continue;
        }
        const BinaryWeights w =
            binary_weights(targets, labels, in_target(i, elements, near, far),
                           weight_of(positive_weights, (int)(i % classes)));
        const Chances c = chances(logits[i]);
        double up = c.p, down = c.q;
        if (gamma > 0.0) {
            up = pow(c.p, gamma) * (c.p + gamma * c.q * c.minus_log_q);
            down = pow(c.q, gamma) * (c.q + gamma * c.p * c.minus_log_p);
        }
        d[i] = (float)((w.negative * up - w.positive * down) * scale);
    }
}

// rows (leaves): for each leaf, the number of correct elements: the logit is > 0 and the target is
// 1, or neither is true. Labels other than 0 and 1 do not count. The number is NaN if a logit with
// a target that counts is NaN.
extern "C" __global__ void __launch_bounds__(256)
    loss_binary_correct(const float* __restrict__ logits, const float* __restrict__ targets,
                        const int* __restrict__ labels, const int* __restrict__ valid,
                        double* __restrict__ rows, int near, int far, int elements, int images,
                        int parts, int chunk) {
    __shared__ double of_warp[256 / LANES_OF_WARP];
    const Range own = leaf(valid, elements, images, parts, chunk);
    double value = 0.0;
    for (long long i = own.first + threadIdx.x; i < own.stop; i += blockDim.x) {
        const long long at = in_target(i, elements, near, far);
        const int label = labels ? labels[at] : (int)(targets[at] > 0.5f);
        const float logit = logits[i];
        if (logit != logit && (label == 0 || label == 1)) value = logit;
        value += (logit > 0.0f) == label;
    }
    add_warps(of_warp, sum_of_warp(value), rows);
}
