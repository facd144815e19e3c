// Softmax, cross-entropy and errors in double precision: the reported losses, and the gradients
// that start the backward pass.
//
// logits are stored as (rows, classes), where a row is an image or, in segmentation, a pixel. A
// block of threads processes 16 rows at once, one per warp. A lane adds up every 32nd class, and a
// tree adds up the lanes. Kernels for errors process one element per thread.

enum { ROWS = 16, LANES_OF_WARP = 32 };

// A row of the table of a launch that computes sums over images: scores and targets, the number of
// valid images, the leaves of the sum, numbers that divide the images into leaves, which of a
// kernel's sums it is, and what `rest` points to.
//
// An image has `size` rows of scores, or elements. A leaf consists of `images` whole images, or of
// one of the `parts` of an image, and has at most `chunk` rows or elements.
struct Sum {
    const float* y;
    const long long* rest;
    const void* target;
    const int* valid;
    double* leaves;
    int size, images, parts, chunk, count, kind;

    __device__ __forceinline__ Sum(const long long* table, int columns) {
        const long long* row = table + (10 + columns) * blockIdx.y;
        y = reinterpret_cast<const float*>(row[0]);
        target = reinterpret_cast<const void*>(row[1]);
        valid = reinterpret_cast<const int*>(row[2]);
        leaves = reinterpret_cast<double*>(row[3]);
        size = row[4], images = row[5], parts = row[6], chunk = row[7], count = row[8];
        kind = row[9], rest = row + 10;
    }
    template <class T = double> __device__ __forceinline__ const T* array(int column) const {
        return reinterpret_cast<const T*>(rest[column]);
    }
    __device__ __forceinline__ double number(int column) const {
        return __longlong_as_double(rest[column]);
    }
};

// Returns the sum of `value` over a warp's lanes, in each lane.
__device__ __forceinline__ double sum_of_warp(double value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value += shfl_xor(value, mask);
    return value;
}

// Computes the leaves of a sum. term(i, value) adds the term of row or element i, without unused
// images, to `value`. A warp computes a row (WHOLE_WARPS), or a thread an element. The values of the
// block's warps are added in order.
template <bool WHOLE_WARPS, class Term>
__device__ __forceinline__ void sum_leaves(const Sum& of, Term term) {
    __shared__ double of_warp[ROWS];
    constexpr int WIDTH = WHOLE_WARPS ? LANES_OF_WARP : 1;
    for (int leaf = blockIdx.x; leaf < of.count; leaf += gridDim.x) {
        const long long image = (long long)(leaf / of.parts) * of.images;
        const long long first = image * of.size + (long long)(leaf % of.parts) * of.chunk;
        const long long used = min(image + of.images, (long long)*of.valid) * of.size;
        double value = 0.0;
        for (long long i = first + threadIdx.x / WIDTH; i < min(first + of.chunk, used);
             i += blockDim.x / WIDTH)
            term(i, value);
        if (!WHOLE_WARPS) value = sum_of_warp(value);
        if (threadIdx.x % LANES_OF_WARP == 0) of_warp[threadIdx.x / LANES_OF_WARP] = value;
        __syncthreads();
        if (threadIdx.x == 0) {
            double sum = 0.0;
            for (int i = 0; i < (int)blockDim.x / LANES_OF_WARP; i++) sum += of_warp[i];
            of.leaves[leaf] = sum;
        }
        __syncthreads();  // before the next leaf overwrites of_warp
    }
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

// Sums of the class weights of the labels. Then: class weights or null, classes.
extern "C" __global__ void __launch_bounds__(512)
    loss_label_weight(const long long* __restrict__ table) {
    const Sum of(table, 2);
    const int* labels = static_cast<const int*>(of.target);
    sum_leaves<false>(of, [&](long long row, double& value) {
        if (is_class(labels[row], of.rest[1])) value += weight_of(of.array(0), labels[row]);
    });
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

// Sums over rows with a label: of the terms of LabelRule in
// mpidl/backends/training_interface.py, or of the rows whose largest logit belongs to the label (NaN
// if the logits of a row with a label include NaN), if kind is 1. Then: class weights or null,
// smoothing, gamma, classes.
extern "C" __global__ void __launch_bounds__(512)
    loss_of_labels(const long long* __restrict__ table) {
    const Sum of(table, 4);
    const int* labels = static_cast<const int*>(of.target);
    const double* weights = of.array(0);
    const double smoothing = of.number(1), gamma = of.number(2);
    const int classes = of.rest[3];
    sum_leaves<true>(of, [&](long long row, double& value) {
        if (!is_class(labels[row], classes)) return;
        const float* scores = of.y + row * classes;
        if (of.kind == 1) {
            const int c = prediction(scores, classes);
            value += scores[c] != scores[c] ? scores[c] : (double)(c == labels[row]);
            return;
        }
        const Normalizer by = normalizer(scores, classes);
        double loss = log(by.sum) - (scores[labels[row]] - by.top);
        if (gamma > 0.0) loss *= pow(1.0 - exp(-loss), gamma);
        value += (1.0 - smoothing) * weight_of(weights, labels[row]) * loss;
        if (smoothing > 0.0) {
            double smooth = 0.0;
#pragma unroll 1
            for (int c = threadIdx.x % LANES_OF_WARP; c < classes; c += LANES_OF_WARP)
                smooth += weight_of(weights, c) * (scores[c] - by.top - log(by.sum));
            value -= smoothing / classes * sum_of_warp(smooth);
        }
    });
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

// Sums of |y - target|, or of (y - target)^2 if kind is 2. Then: near, far (see in_target).
extern "C" __global__ void __launch_bounds__(256)
    loss_errors(const long long* __restrict__ table) {
    const Sum of(table, 2);
    const float* target = static_cast<const float*>(of.target);
    sum_leaves<false>(of, [&](long long i, double& value) {
        const double e = error(of.y, target, i, of.size, of.rest[0], of.rest[1]);
        value += of.kind == 2 ? e * e : fabs(e);
    });
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

// d (rows, classes): the gradient of the terms of loss_of_targets, times factor * late. d is 0 for unused
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

// Sums over rows: of -q log p over the classes, where q are the targets after label smoothing, or of
// the target of the class with the largest logit (NaN if a logit is NaN), if kind is 1. Then: near,
// far, smoothing, classes.
extern "C" __global__ void __launch_bounds__(512)
    loss_of_targets(const long long* __restrict__ table) {
    const Sum of(table, 4);
    const float* targets = static_cast<const float*>(of.target);
    const int near = of.rest[0], far = of.rest[1], classes = of.rest[3];
    const double smoothing = of.number(2);
    sum_leaves<true>(of, [&](long long row, double& value) {
        const float* scores = of.y + row * classes;
        if (of.kind == 1) {
            const int c = prediction(scores, classes);
            const long long at = in_target(row * classes + c, classes * of.size, near, far);
            value += scores[c] != scores[c] ? scores[c] : targets[at];
            return;
        }
        const Normalizer by = normalizer(scores, classes);
        const double log_sum = log(by.sum);
        double loss = 0.0;
        for (int c = threadIdx.x % LANES_OF_WARP; c < classes; c += LANES_OF_WARP)
            loss += smoothed(targets, row, c, smoothing, classes, of.size, near, far) *
                    (log_sum - (scores[c] - by.top));
        value += sum_of_warp(loss);
    });
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

// Sums over elements: of the terms of BinaryRule, or of the correct elements, if kind is 1: the logit
// is > 0 and the target is 1, or neither is true. Labels other than 0 and 1 do not count. The number
// is NaN if a logit with a target that counts is NaN. In memory, elements of an image with
// consecutive numbers have consecutive classes. Then: one weight per class or null, gamma, near, far,
// classes, whether the targets are ints.
extern "C" __global__ void __launch_bounds__(256)
    loss_of_elements(const long long* __restrict__ table) {
    const Sum of(table, 6);
    const int near = of.rest[2], far = of.rest[3], classes = of.rest[4];
    const int* labels = of.rest[5] ? static_cast<const int*>(of.target) : nullptr;
    const float* targets = static_cast<const float*>(of.target);
    const double gamma = of.number(1);
    sum_leaves<false>(of, [&](long long i, double& value) {
        const long long at = in_target(i, of.size, near, far);
        const float logit = of.y[i];
        if (of.kind == 1) {
            const int label = labels ? labels[at] : (int)(targets[at] > 0.5f);
            if (logit != logit && (label == 0 || label == 1)) value = logit;
            value += (logit > 0.0f) == label;
            return;
        }
        const BinaryWeights w =
            binary_weights(targets, labels, at, weight_of(of.array(0), (int)(i % classes)));
        const Chances c = chances(logit);
        double up = c.minus_log_q, down = c.minus_log_p;
        if (gamma > 0.0) up *= pow(c.p, gamma), down *= pow(c.q, gamma);
        value += w.positive * down + w.negative * up;
    });
}
